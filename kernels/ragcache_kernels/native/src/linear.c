#include "linear.h"

#include "input.h"

enum {
    GROUP = 16,    /* panels whose sums are under way, so that input is taken once for all */
    PIECES = 4,    /* of work for each member, at least: so that all end at about one time */
    MANY_ROWS = 24 /* from there on, widening weights to a buffer pays */
};

/* A row's sums for one panel. */
typedef floats tile[2];

/* What a member has at hand: a block of rows, the part of them that was taken, sums. */
struct work {
    struct input input;
    struct rows rows; /* from element `taken` on */
    int64_t taken;
    _Alignas(64) char buffer[INPUT_BYTES];
    floats wide[2 * BLOCK_STEPS][2];
    tile tiles[GROUP][BLOCK_ROWS];
};

static int is_gated(const struct linear *call) { return call->epilogue >= SILU; }

/* Output columns of a panel. */
static int64_t columns(const struct linear *call) { return is_gated(call) ? LANES : PANEL; }

/* x · sigmoid(z): silu for z = x; gelu by tanh, of which 1 + tanh(z / 2) = 2 · sigmoid(z). */
INLINE floats activate(floats x, enum epilogue epilogue) {
    floats z = x;
    if (epilogue == GELU_TANH) z = 1.59576912f * (x + 0.044715f * x * x * x);
    floats power = exp2_of(-1.44269504f * larger(z, -z)); /* at most 1 */
    return x * choose(z > 0, fill(1), power) / (1 + power);
}

/* The product's LANES elements from a packed column on. */
INLINE floats element(const struct packed *weight, floats sum, int64_t column) {
    if (weight->dtype == I8) sum *= load(weight->scales, column, F32);
    return weight->bias == NULL ? sum : sum + load(weight->bias, column, F32);
}

/* Write LANES elements of an output row from `column` on, as far as it goes. */
INLINE void finish_some(const struct linear *call, int64_t row, int64_t column, floats value) {
    int64_t left = call->weight->out - column, at = row * call->output_stride + column;
    if (left >= LANES) {
        if (call->epilogue == ADD) value += load(call->output, at, call->dtype);
        store(call->output, at, call->dtype, value);
    } else if (left > 0) {
        if (call->epilogue == ADD) value += load_some(call->output, at, call->dtype, (int)left);
        store_some(call->output, at, call->dtype, value, (int)left);
    }
}

static void finish(const struct linear *call, int64_t panel, const struct input *input,
                   const tile *sums) {
    for (int i = 0; i < input->count; i++) {
        floats left = element(call->weight, sums[i][0], panel * PANEL);
        floats right = element(call->weight, sums[i][1], panel * PANEL + LANES);
        int64_t row = input->first + i;
        if (is_gated(call)) {
            finish_some(call, row, panel * LANES, activate(left, call->epilogue) * right);
        } else {
            finish_some(call, row, panel * PANEL, left);
            finish_some(call, row, panel * PANEL + LANES, right);
        }
    }
}

/* Rows at a time. Weights that are widened in registers take two of those of AVX2. */
static int most_rows(enum dtype weights) {
    return weights == BF16 && !DOT_PRODUCTS && LANES < 16 ? TILE_ROWS - 1 : TILE_ROWS;
}

/* In as few parts as there can be, about equal ones. */
static void multiply_rows(struct rows rows, const char *panel, int64_t steps,
                          enum dtype weights, tile *tiles) {
    int64_t size = ceil_div(rows.count, ceil_div(rows.count, most_rows(weights)));
    for (int64_t i = 0; i < rows.count; i += size) {
        int count = rows.count - i < size ? rows.count - i : size;
        struct rows some = {rows.base + i * rows.stride, rows.stride, rows.scales, count};
        multiply(some, panel, steps, weights, &tiles[i]);
    }
}

static void multiply_panel(struct work *work, const char *panel, int64_t steps, tile *tiles) {
    enum dtype weights = work->input.call->weight->dtype;
    if (weights == BF16 && !DOT_PRODUCTS && work->rows.count >= MANY_ROWS) {
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
    return ceil_div(ceil_div(in, blocks), SPAN) * SPAN;
}

static void run_piece(struct work *work, struct input input, range panels) {
    if (work->input.first != input.first) work->taken = -1;
    work->input = input;
    run_group(work, panels, block_depth(&input));
}

/* How many groups to take the panels in: for each member a few, of about equal sizes. */
static int64_t groups_of(int64_t panels, int64_t blocks, int members) {
    int64_t least = ceil_div(panels, GROUP), wanted = ceil_div(PIECES * members, blocks);
    return least > wanted ? least : wanted < panels ? wanted : panels;
}

void linear(const struct linear *call, const member *self) {
    if (call->rows == 0) return;
    int64_t blocks = ceil_div(call->rows, BLOCK_ROWS);
    int64_t size = ceil_div(ceil_div(call->rows, blocks), TILE_ROWS) * TILE_ROWS;
    int64_t panels = ceil_div(call->weight->out, columns(call));
    int64_t groups = groups_of(panels, blocks, self->size), piece;
    struct work work;
    work.input.first = -1;
    while ((piece = team_take(self)) < blocks * groups) {
        int64_t first = piece / groups * size, group = piece % groups;
        int count = call->rows - first < size ? (int)(call->rows - first) : (int)size;
        range some = {panels * group / groups, panels * (group + 1) / groups};
        run_piece(&work, (struct input){call, first, count}, some);
    }
}

static void run(void *call, const member *self) { linear(call, self); }

void run_linear(struct team *team, const struct linear *call) { team_run(team, run, (void *)call); }

int panel_columns(void) { return PANEL; }
