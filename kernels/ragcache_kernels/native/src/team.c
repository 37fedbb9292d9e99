/* The team: workers spin for a short while for the next body, then sleep.
 *
 * Spinning bridges the microseconds between two calls of a step; a team that sleeps leaves the
 * cores to whoever else computes (torch's own threads, tokenizers, the server).
 */
#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum { SPINS = 2000, YIELD_AFTER = 1000 };

struct team {
    int size, started; /* threads that there should be and are, the caller among them */
    pthread_t *threads;
    body run;
    void *argument;
    atomic_uint round;    /* counts bodies; a change starts the workers */
    atomic_int running;   /* workers that have not finished the body */
    atomic_int arrived;   /* of the barrier */
    atomic_uint barrier;  /* counts barriers that were passed */
    atomic_long taken;    /* pieces of work since then */
    atomic_int stopping;
    atomic_int sleepers;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

typedef struct {
    struct team *team;
    int rank;
} seat;

/* Where cores are fewer than threads, the one that is waited for must get to run. */
static void pause_for(int *turns) {
    if (++*turns > YIELD_AFTER) {
        sched_yield();
    } else {
        RELAX();
    }
}

static unsigned next_round(struct team *team, unsigned seen) {
    for (int turns = 0; turns < SPINS; turns++) {
        unsigned round = atomic_load(&team->round);
        if (round != seen) return round;
        RELAX();
    }
    pthread_mutex_lock(&team->mutex);
    atomic_fetch_add(&team->sleepers, 1);
    while (atomic_load(&team->round) == seen) pthread_cond_wait(&team->wake, &team->mutex);
    atomic_fetch_sub(&team->sleepers, 1);
    pthread_mutex_unlock(&team->mutex);
    return atomic_load(&team->round);
}

static void start_round(struct team *team) {
    atomic_fetch_add(&team->round, 1);
    if (atomic_load(&team->sleepers) == 0) return;
    pthread_mutex_lock(&team->mutex);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->mutex);
}

static void *work(void *argument) {
    seat mine = *(seat *)argument;
    free(argument);
    member self = {mine.rank, mine.team->size, mine.team};
    unsigned seen = 0;
    for (;;) {
        seen = next_round(mine.team, seen);
        if (atomic_load(&mine.team->stopping)) return NULL;
        mine.team->run(mine.team->argument, &self);
        atomic_fetch_sub(&mine.team->running, 1);
    }
}

static int start_worker(struct team *team, int rank) {
    seat *mine = malloc(sizeof *mine);
    if (mine == NULL) return -1;
    *mine = (seat){team, rank};
    if (pthread_create(&team->threads[rank], NULL, work, mine) == 0) return 0;
    free(mine);
    return -1;
}

struct team *team_new(int size) {
    struct team *team = calloc(1, sizeof *team);
    if (team == NULL) return NULL;
    team->size = size;
    team->threads = calloc(size, sizeof *team->threads);
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->wake, NULL);
    for (team->started = 1; team->started < size; team->started++) {
        if (team->threads == NULL || start_worker(team, team->started) != 0) {
            team_free(team);
            return NULL;
        }
    }
    return team;
}

void team_free(struct team *team) {
    atomic_store(&team->stopping, 1);
    start_round(team);
    for (int rank = 1; rank < team->started; rank++) pthread_join(team->threads[rank], NULL);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->mutex);
    free(team->threads);
    free(team);
}

void team_run(struct team *team, body run, void *argument) {
    member self = {0, team->size, team};
    atomic_store(&team->taken, 0);
    if (team->size > 1) {
        team->run = run;
        team->argument = argument;
        atomic_store(&team->running, team->size - 1);
        start_round(team);
    }
    run(argument, &self);
    for (int turns = 0; atomic_load(&team->running) > 0;) pause_for(&turns);
}

void team_wait(const member *self) {
    struct team *team = self->team;
    unsigned passed = atomic_load(&team->barrier);
    if (atomic_fetch_add(&team->arrived, 1) == team->size - 1) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->taken, 0);
        atomic_fetch_add(&team->barrier, 1);
        return;
    }
    for (int turns = 0; atomic_load(&team->barrier) == passed;) pause_for(&turns);
}

int64_t team_take(const member *self) {
    return atomic_fetch_add_explicit(&self->team->taken, 1, memory_order_relaxed);
}
