#include "linear.h"

#include "input.h"

enum { GROUP = 8 }; /* panels whose sums are under way, so that input is taken once for all */

/* A row's sums for one panel: float32, or int32 of int8 weights. */
typedef floats tile[2];

/* What a member has at hand: a block of rows, the part of them that was taken, sums. */
struct work {
    struct input input;
    struct rows rows; /* from element `taken` on */
    int64_t taken;
    _Alignas(64) char buffer[INPUT_BYTES];
    floats wide[BLOCK_DEPTH][2];
    tile tiles[GROUP][BLOCK_ROWS];
};

static int is_gated(const struct linear *call) { return call->epilogue >= SILU; }

/* Output columns of a panel. */
static int64_t columns(const struct linear *call) { return is_gated(call) ? LANES : PANEL; }

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* x · sigmoid(z): silu for z = x; gelu by tanh, of which 1 + tanh(z / 2) = 2 · sigmoid(z). */
INLINE floats activate(floats x, enum epilogue epilogue) {
    floats z = x;
    if (epilogue == GELU_TANH) z = 1.59576912f * (x + 0.044715f * x * x * x);
    floats power = exp2_of(-1.44269504f * larger(z, -z)); /* at most 1 */
    return x * choose(z > 0, fill(1), power) / (1 + power);
}

INLINE floats scaled(const struct packed *weight, ints sum, float row, int64_t column) {
    ints totals;
    floats scales = load(weight->scales, column, F32);
    memcpy(&totals, weight->totals + column, sizeof totals);
    return __builtin_convertvector(sum - ZERO_POINT * totals, floats) * (scales * row);
}

/* The product's LANES elements from a packed column on. */
INLINE floats element(const struct packed *weight, floats sum, float scale, int64_t column) {
    if (weight->dtype == I8) sum = scaled(weight, (ints)sum, scale, column);
    return weight->bias == NULL ? sum : sum + load(weight->bias, column, F32);
}

/* Write LANES elements of an output row from `column` on, as far as it goes. */
INLINE void finish_some(const struct linear *call, int64_t row, int64_t column, floats value) {
    int64_t left = call->weight->out - column, at = row * call->output_stride + column;
    if (left <= 0) return;
    int count = left < LANES ? (int)left : LANES;
    if (call->epilogue == ADD) value += load_some(call->output, at, call->dtype, count);
    store_some(call->output, at, call->dtype, value, count);
}

static void finish(const struct linear *call, int64_t panel, const struct input *input,
                   const tile *sums) {
    for (int i = 0; i < input->count; i++) {
        float scale = input->scales[i];
        floats left = element(call->weight, sums[i][0], scale, panel * PANEL);
        floats right = element(call->weight, sums[i][1], scale, panel * PANEL + LANES);
        int64_t row = input->first + i;
        if (is_gated(call)) {
            finish_some(call, row, panel * LANES, activate(left, call->epilogue) * right);
        } else {
            finish_some(call, row, panel * PANEL, left);
            finish_some(call, row, panel * PANEL + LANES, right);
        }
    }
}

static void multiply_rows(struct rows rows, const char *panel, int64_t steps,
                          enum dtype weights, tile *tiles) {
    for (int i = 0; i < rows.count; i += TILE_ROWS) {
        int count = rows.count - i < TILE_ROWS ? rows.count - i : TILE_ROWS;
        struct rows some = {rows.base + i * rows.stride, rows.stride, count};
        multiply(some, panel, steps, weights, tiles[i]);
    }
}

/* Weights that many rows use are widened once for all of them. */
static void multiply_panel(struct work *work, const char *panel, int64_t steps, tile *tiles) {
    enum dtype weights = work->input.call->weight->dtype;
    if (weights == BF16 && !DOT_PRODUCTS && work->rows.count > TILE_ROWS) {
        widen_panel(panel, steps, work->wide);
        multiply_rows(work->rows, (const char *)work->wide, 2 * steps, F32, tiles);
    } else {
        multiply_rows(work->rows, panel, steps, weights, tiles);
    }
}

/* Add what `depth` elements from `k` on give to the sums of a group of panels. */
static void multiply_group(struct work *work, range panels, int64_t k, int64_t depth) {
    const struct packed *weight = work->input.call->weight;
    int per_step = weights_per_step(weight->dtype);
    int64_t steps = ceil_div(weight->in, per_step), step_bytes = 4 * PANEL;
    if (work->taken != k) work->rows = take_rows(&work->input, k, depth, work->buffer);
    work->taken = k;
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
        const char *from = weight->panels;
        from += (panel * steps + k / per_step) * step_bytes;
        multiply_panel(work, from, ceil_div(depth, per_step), work->tiles[panel - panels.begin]);
    }
}

/* The rows of `work->input` times a group of panels, all along k. */
static void run_group(struct work *work, range panels, int64_t depth) {
    const struct linear *call = work->input.call;
    int64_t in = call->weight->in;
    for (int i = 0; i < GROUP; i++) memset(work->tiles[i], 0, work->input.count * sizeof(tile));
    for (int64_t k = 0; k < in; k += depth)
        multiply_group(work, panels, k, depth < in - k ? depth : in - k);
    for (int64_t panel = panels.begin; panel < panels.end; panel++)
        finish(call, panel, &work->input, work->tiles[panel - panels.begin]);
}

/* Blocks as deep as the buffer allows, and about equally deep. */
static int64_t block_depth(const struct input *input) {
    int64_t in = input->call->weight->in, blocks = ceil_div(in, input_depth(input));
    return ceil_div(ceil_div(in, blocks), LANES) * LANES;
}

static void run_block(const struct linear *call, int64_t first, int count, range panels) {
    struct work work;
    work.taken = -1;
    open_input(&work.input, call, first, count);
    int64_t depth = block_depth(&work.input);
    for (int64_t panel = panels.begin; panel < panels.end; panel += GROUP) {
        int64_t end = panel + GROUP < panels.end ? panel + GROUP : panels.end;
        run_group(&work, (range){panel, end}, depth);
    }
}

/* Members that share the rows, where there are many; the others share the columns. */
static int row_parts(int64_t rows, int size) {
    int parts = 1;
    for (int each = 2; each <= size; each++)
        if (size % each == 0 && rows >= each * BLOCK_ROWS / 2) parts = each;
    return parts;
}

void linear(const struct linear *call, const member *self) {
    int parts = row_parts(call->rows, self->size);
    member by_rows = {self->rank % parts, parts, NULL};
    member by_columns = {self->rank / parts, self->size / parts, NULL};
    range rows = share(call->rows, TILE_ROWS, &by_rows);
    range panels = share(ceil_div(call->weight->out, columns(call)), 1, &by_columns);
    int64_t count = rows.end - rows.begin, blocks = ceil_div(count, BLOCK_ROWS);
    if (count == 0) return;
    int64_t size = ceil_div(ceil_div(count, blocks), TILE_ROWS) * TILE_ROWS;
    for (int64_t first = rows.begin; first < rows.end; first += size) {
        int64_t left = rows.end - first;
        run_block(call, first, left < size ? left : size, panels);
    }
}

static void run(void *call, const member *self) { linear(call, self); }

void run_linear(struct team *team, const struct linear *call) { team_run(team, run, (void *)call); }

int panel_columns(void) { return PANEL; }
