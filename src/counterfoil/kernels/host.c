/* NAAF's word effects of a block of similarities, for `host_naaf`, which says what the names mean.

   Similarities [images, regions, places · captions] are read once, a region's row at a time, while they
   are in a core's cache; what is summed over regions stays in `rooms`. Loops over captions, over words
   or over LANES words have no order, so that a compiler makes vectors of them. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* e^x to single precision for |x| < 87. */
static inline float power(float x) {
  const float large = 12582912.0f; /* added to a number, it leaves the nearest integer in the last bits */
  float shifted = x * 1.44269504f + large;
  float whole = shifted - large;
  float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits << 23) + 0x3f800000u;
  float two_to_whole;
  memcpy(&two_to_whole, &bits, 4);
  return p * two_to_whole;
}

/* Eq. 11 of one region, and the best similarity of each word so far. `slope` of similarities below zero
   is 0 or 0.1. */
static void add_region(const float *restrict sims, int64_t places, int64_t captions, float slope, float scale,
                       float least, float *restrict lengths, float *restrict best,
                       float *restrict total, float *restrict matched) {
  for (int64_t q = 0; q < captions; q++) lengths[q] = 0.0f;
  for (int64_t j = 0; j < places; j++) {
    const float *restrict row = sims + j * captions;
    float *restrict top = best + j * captions;
#pragma omp simd
    for (int64_t q = 0; q < captions; q++) {
      float s = row[q], raised = s > 0.0f ? s : slope * s;
      top[q] = s > top[q] ? s : top[q];
      lengths[q] += raised * raised;
    }
  }
#pragma omp simd
  for (int64_t q = 0; q < captions; q++) lengths[q] = scale / (sqrtf(lengths[q]) + least);
  for (int64_t j = 0; j < places; j++) {
    const float *restrict row = sims + j * captions;
    float *restrict sum = total + j * captions, *restrict weighted = matched + j * captions;
#pragma omp simd
    for (int64_t q = 0; q < captions; q++) {
      float s = row[q], raised = s > 0.0f ? s : slope * s;
      float weight = power(raised * lengths[q]);
      sum[q] += weight;
      weighted[q] += weight * s;
    }
  }
}

/* Eq. 10 of LANES words: their cosines with the regions above the boundary, weighted. */
static void attend(const float *sims, const float *gram, const float *real, const float *norms,
                   const int64_t *words, int64_t regions, int64_t all_words, float boundary,
                   float shortest, float *restrict rooms, float *restrict cosines) {
  lanes *weights = (lanes *)rooms;
  lanes matched = {0}, squared = {0};
  for (int64_t k = 0; k < regions; k++) {
    const float *row = sims + k * all_words;
    lanes s = {0}, own = {0}, context[4] = {{0}}; /* four, so that sums need not wait for one another */
    if (!real || real[k] != 0.0f) {
      float near[LANES], weight[LANES];
      for (int64_t l = 0; l < LANES; l++) near[l] = row[words[l]];
#pragma omp simd
      for (int64_t l = 0; l < LANES; l++) {
        float whole = power(near[l]);
        weight[l] = near[l] > boundary ? whole : 0.0f;
      }
      memcpy(&s, near, sizeof s);
      memcpy(&own, weight, sizeof own);
    }
    weights[k] = own;
    const float *inner = gram + k * regions;
    int64_t o = 0;
    for (; o + 4 <= k; o += 4)
      for (int64_t c = 0; c < 4; c++) context[c] += inner[o + c] * weights[o + c];
    for (; o < k; o++) context[0] += inner[o] * weights[o];
    lanes others = context[0] + context[1] + context[2] + context[3];
    squared += own * (2.0f * others + inner[k] * own); /* each pair of regions once, so twice */
    matched += own * s;
  }
  for (int64_t l = 0; l < LANES; l++) {
    float length = sqrtf(squared[l] > 0.0f ? squared[l] : 0.0f) * norms[words[l]];
    cosines[l] = matched[l] / (length > shortest ? length : shortest);
  }
}

/* `factors` [images, regions] are yet to be multiplied into `sims`, which is overwritten; `real`
   [images, regions] is 0 where a region is padding. Either may be null. `best` and `effects`
   [images, places · captions] are written. `rooms` has (2 · places + 1) · captions + LANES · regions. */
void naaf_effects(float *sims, const float *factors, const float *gram, const float *real,
                  const float *norms, float *best, float *effects, float *rooms, int64_t images,
                  int64_t regions, int64_t places, int64_t captions, float slope, float scale, float least,
                  float boundary, float shortest) {
  const int64_t all_words = places * captions;
  float *total = rooms, *matched = total + all_words, *lengths = matched + all_words;
  float *weights = lengths + captions;
  for (int64_t i = 0; i < images; i++) {
    float *here = sims + i * regions * all_words;
    const float *shown = real ? real + i * regions : 0;
    float *top = best + i * all_words, *effect = effects + i * all_words;
    for (int64_t m = 0; m < all_words; m++) {
      top[m] = -2.0f * scale;
      total[m] = matched[m] = 0.0f;
    }
    for (int64_t k = 0; k < regions; k++) {
      if (shown && shown[k] == 0.0f) continue;
      float *restrict row = here + k * all_words;
      if (factors) {
        const float factor = factors[i * regions + k];
        for (int64_t m = 0; m < all_words; m++) row[m] *= factor;
      }
      add_region(row, places, captions, slope, scale, least, lengths, top, total, matched);
    }
    for (int64_t m = 0; m < all_words; m++) {
      float sum = total[m] * scale;
      effect[m] = matched[m] / (sum > 1.17549435e-38f ? sum : 1.17549435e-38f);
    }
    int64_t words[LANES];
    float cosines[LANES];
    for (int64_t m = 0, count = 0; m <= all_words; m++) {
      if (m < all_words && top[m] > boundary) words[count++] = m;
      if (count < LANES && !(m == all_words && count)) continue;
      for (int64_t l = count; l < LANES; l++) words[l] = words[0];
      attend(here, gram + i * regions * regions, shown, norms, words, regions, all_words, boundary,
             shortest, weights, cosines);
      for (int64_t l = 0; l < count; l++) effect[words[l]] += cosines[l];
      count = 0;
    }
  }
}
