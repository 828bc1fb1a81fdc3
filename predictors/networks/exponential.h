/* The exponential function of float32, in operations that compilers vectorise. */
#include <math.h>
#include <stdint.h>

/* e^x with a relative error below 2e-7, for |x| < 87; beyond, the result of the limit. Cody and
 * Waite's reduction by multiples of ln 2, and a polynomial of the sixth degree on the rest. */
static inline float exponential(float x) {
    /* NaN becomes a limit here, as no integer stands for it. */
    float bounded = x > -87.0f ? (x < 87.0f ? x : 87.0f) : -87.0f;
    float multiple = rintf(bounded * 1.44269504f);
    float rest = bounded - multiple * 0.693359375f + multiple * 2.12194440e-4f;
    float sum = 1.0f / 720.0f;
    sum = sum * rest + 1.0f / 120.0f;
    sum = sum * rest + 1.0f / 24.0f;
    sum = sum * rest + 1.0f / 6.0f;
    sum = sum * rest + 0.5f;
    sum = sum * rest + 1.0f;
    sum = sum * rest + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {((int32_t)multiple + 127) << 23};
    return x == x ? sum * power.value : x;
}
