/* What Python sees of the library; `library.py` has the same declarations. */
#pragma once

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
