/* Threads that run one function together, each its share (single program, multiple data). */
#pragma once

#include "abi.h"

/* One member's view while a body runs. */
typedef struct {
    int rank, size;
    struct team *team;
} member;

typedef void (*body)(void *argument, const member *self);

/* A team of `size` threads with the caller among them; NULL when threads cannot be had. */
EXPORT struct team *team_new(int size);
EXPORT void team_free(struct team *team);

/* Run `run` on all members and return when all are done. One caller at a time. */
void team_run(struct team *team, body run, void *argument);

/* Within a body: go on when all members have come here. */
void team_wait(const member *self);

/* Within a body: the number of a piece of work that no other member gets, from 0 on, until all
 * have waited for each other. So one whose core is slower, or lent to others, does less. */
int64_t team_take(const member *self);

typedef struct {
    int64_t begin, end;
} range;

/* This member's part of `count` things, cut at multiples of `unit`. */
static inline range share(int64_t count, int64_t unit, const member *self) {
    int64_t units = (count + unit - 1) / unit;
    int64_t begin = units * self->rank / self->size * unit;
    int64_t end = units * (self->rank + 1) / self->size * unit;
    return (range){begin < count ? begin : count, end < count ? end : count};
}
