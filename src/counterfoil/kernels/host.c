/* What words or regions find on the other side, of a block of similarities: for `host_naaf` and
   `host_attention`, which say what the names mean.

   Similarities [images, regions, places · captions] are read a region's row at a time, while they are in a
   core's cache; what is summed stays in `rooms`. Loops over captions, over words or over LANES of either
   have no order, so that a compiler makes vectors of them. */

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

/* Similarities below zero count by `slope`: 0, 0.1 or 1. */
static inline float raised(float s, float slope) { return s > 0.0f ? s : slope * s; }

/* Eq. 11 of one region, and the best similarity of each word so far. */
static void add_region(const float *restrict sims, int64_t places, int64_t captions, float slope, float scale,
                       float least, float *restrict lengths, float *restrict best,
                       float *restrict total, float *restrict matched) {
  for (int64_t q = 0; q < captions; q++) lengths[q] = 0.0f;
  for (int64_t j = 0; j < places; j++) {
    const float *restrict row = sims + j * captions;
    float *restrict top = best + j * captions;
#pragma omp simd
    for (int64_t q = 0; q < captions; q++) {
      float s = row[q], r = raised(s, slope);
      top[q] = s > top[q] ? s : top[q];
      lengths[q] += r * r;
    }
  }
#pragma omp simd
  for (int64_t q = 0; q < captions; q++) lengths[q] = scale / (sqrtf(lengths[q]) + least);
  for (int64_t j = 0; j < places; j++) {
    const float *restrict row = sims + j * captions;
    float *restrict sum = total + j * captions, *restrict weighted = matched + j * captions;
#pragma omp simd
    for (int64_t q = 0; q < captions; q++) {
      float s = row[q], r = raised(s, slope);
      float weight = power(r * lengths[q]);
      sum[q] += weight;
      weighted[q] += weight * s;
    }
  }
}

/* What LANES fragments have in common with the contexts that their weights [answers] make of fragments
   whose inner products are `gram` [answers, answers]: Σ w s, and the square of the context's length. */
static void contexts(const lanes *weights, const lanes *near, const float *gram, int64_t answers,
                     lanes *matched, lanes *squared) {
  lanes in_common = {0}, length = {0};
  for (int64_t k = 0; k < answers; k++) {
    const float *inner = gram + k * answers;
    lanes context[4] = {{0}}; /* four, so that sums need not wait for one another */
    int64_t o = 0;
    for (; o + 4 <= k; o += 4)
      for (int64_t c = 0; c < 4; c++) context[c] += inner[o + c] * weights[o + c];
    for (; o < k; o++) context[0] += inner[o] * weights[o];
    lanes others = context[0] + context[1] + context[2] + context[3];
    length += weights[k] * (2.0f * others + inner[k] * weights[k]); /* each pair once, so twice */
    in_common += weights[k] * near[k];
  }
  *matched = in_common;
  *squared = length;
}

static inline float cosine(float matched, float squared, float norm, float shortest) {
  float length = sqrtf(squared > 0.0f ? squared : 0.0f) * norm;
  return matched / (length > shortest ? length : shortest);
}

/* Eq. 10 of LANES words: their cosines with the regions above the boundary, weighted. */
static void attend(const float *sims, const float *gram, const float *real, const float *norms,
                   const int64_t *words, int64_t regions, int64_t all_words, float boundary,
                   float shortest, lanes *rooms, float *restrict cosines) {
  lanes *weights = rooms, *near = rooms + regions, matched, squared;
  for (int64_t k = 0; k < regions; k++) {
    const float *row = sims + k * all_words;
    float s[LANES] = {0}, weight[LANES] = {0};
    if (!real || real[k] != 0.0f) {
      for (int64_t l = 0; l < LANES; l++) s[l] = row[words[l]];
#pragma omp simd
      for (int64_t l = 0; l < LANES; l++) {
        float whole = power(s[l]);
        weight[l] = s[l] > boundary ? whole : 0.0f;
      }
    }
    memcpy(near + k, s, sizeof s);
    memcpy(weights + k, weight, sizeof weight);
  }
  contexts(weights, near, gram, regions, &matched, &squared);
  for (int64_t l = 0; l < LANES; l++)
    cosines[l] = cosine(matched[l], squared[l], norms[words[l]], shortest);
}

/* `factors` [images, regions] are yet to be multiplied into `sims`, which is overwritten; `real`
   [images, regions] is 0 where a region is padding. Either may be null. `best` and `effects`
   [images, places · captions] are written. `rooms` has (2 · places + 1) · captions + 2 · LANES · regions. */
void naaf_effects(float *sims, const float *factors, const float *gram, const float *real,
                  const float *norms, float *best, float *effects, float *rooms, int64_t images,
                  int64_t regions, int64_t places, int64_t captions, float slope, float scale, float least,
                  float boundary, float shortest) {
  const int64_t all_words = places * captions;
  float *total = rooms, *matched = total + all_words, *lengths = matched + all_words;
  lanes *weights = (lanes *)(lengths + captions);
  for (int64_t i = 0; i < images; i++) {
    float *here = sims + i * regions * all_words;
    const float *shown = real ? real + i * regions : 0;
    float *top = best + i * all_words, *effect = effects + i * all_words;
    float lowest = -INFINITY; /* but of an image with padding no lower than that */
    for (int64_t k = 0; shown && k < regions; k++)
      if (shown[k] == 0.0f) lowest = -2.0f * scale;
    for (int64_t m = 0; m < all_words; m++) {
      top[m] = lowest;
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

static inline lanes some(const float *from, int64_t count) {
  lanes found = {0};
  if (count >= LANES)
    memcpy(&found, from, sizeof found);
  else
    memcpy(&found, from, 4 * count);
  return found;
}

static void times_factors(float *restrict sims, const float *factors, int64_t rows, int64_t width) {
  for (int64_t r = 0; factors && r < rows; r++)
    for (int64_t m = 0; m < width; m++) sims[r * width + m] *= factors[r];
}

/* What similarities are divided by. BFAN's ties (kind 1 and 2) are only ties without `least` added. */
static inline float divisor(float squares, float least, int kind) {
  float length = sqrtf(squares);
  return kind ? (length > least ? length : least) : length + least;
}

/* BFAN's focus: what gets less than the others, which count alike (kind 1) or by the root of what they get
   (kind 2), gets nothing. A `tie` of the average is let through. Kind 0: no focus. */
static void focus(lanes *weights, int64_t answers, const float *real, int kind, float tie) {
  float trusted[LANES] = {0}, average[LANES] = {0};
  if (!kind) return;
  for (int64_t k = 0; k < answers; k++) {
    if (real && real[k] == 0.0f) continue;
#pragma omp simd
    for (int64_t l = 0; l < LANES; l++) {
      float weight = ((const float *)(weights + k))[l], trust = kind == 1 ? 1.0f : sqrtf(weight);
      trusted[l] += trust;
      average[l] += weight * trust;
    }
  }
  for (int64_t k = 0; k < answers; k++) {
#pragma omp simd
    for (int64_t l = 0; l < LANES; l++) {
      float *weight = (float *)(weights + k) + l;
      *weight = *weight * trusted[l] > average[l] * (1.0f - tie) ? *weight : 0.0f;
    }
  }
}

/* SCAN and BFAN, words asking: `cosines` [images, places · captions] with the regions they attend to. `rooms` has
   LANES · (2 · regions) + regions · places · captions + captions. */
void word_cosines(float *sims, const float *factors, const float *gram, const float *real,
                  const float *norms, float *cosines, float *rooms, int64_t images, int64_t regions,
                  int64_t places, int64_t captions, float slope, float scale, float least, float tie,
                  int kind) {
  const int64_t all_words = places * captions;
  lanes *weights = (lanes *)rooms, *near = weights + regions;
  float *raw = (float *)(near + regions), *lengths = raw + regions * all_words;
  times_factors(sims, factors, images * regions, all_words);
  for (int64_t i = 0; i < images; i++) {
    const float *here = sims + i * regions * all_words, *shown = real ? real + i * regions : 0;
    for (int64_t k = 0; k < regions; k++) {
      const float *rows = here + k * all_words;
      float *out = raw + k * all_words;
      if (shown && shown[k] == 0.0f) {
        memset(out, 0, 4 * all_words);
        continue;
      }
      for (int64_t q = 0; q < captions; q++) lengths[q] = 0.0f;
      for (int64_t j = 0; j < places; j++) {
        const float *restrict row = rows + j * captions;
#pragma omp simd
        for (int64_t q = 0; q < captions; q++) {
          float r = raised(row[q], slope);
          lengths[q] += r * r;
        }
      }
#pragma omp simd
      for (int64_t q = 0; q < captions; q++) lengths[q] = scale / divisor(lengths[q], least, kind);
      for (int64_t j = 0; j < places; j++) {
        const float *restrict row = rows + j * captions;
        float *restrict weight = out + j * captions;
#pragma omp simd
        for (int64_t q = 0; q < captions; q++) {
          weight[q] = power(raised(row[q], slope) * lengths[q]);
        }
      }
    }
    for (int64_t m = 0; m < all_words; m += LANES) {
      const int64_t count = all_words - m < LANES ? all_words - m : LANES;
      lanes total = {0}, matched, squared;
      for (int64_t k = 0; k < regions; k++) {
        weights[k] = some(raw + k * all_words + m, count);
        near[k] = some(here + k * all_words + m, count);
        total += weights[k];
      }
      focus(weights, regions, shown, kind, tie);
      contexts(weights, near, gram + i * regions * regions, regions, &matched, &squared);
      for (int64_t l = 0; l < count; l++)
        cosines[i * all_words + m + l] = cosine(matched[l], squared[l], norms[m + l], least * total[l]);
    }
  }
}

/* One region's cosines with LANES captions, of which `count` are there. */
static void sentence(const float *sims, const float *kin, const float *said, const float *factors,
                     float norm, int64_t places, int64_t captions, int64_t count, float slope,
                     float least, float tie, int kind, lanes *weights, lanes *near, float *cosines) {
  lanes total = {0}, matched = {0}, squared = {0}, counted = {0}, average = {0};
  for (int64_t j = 0; j < places; j++) {
    float weight[LANES];
    lanes s = some(sims + j * captions, count), factor = some(factors + j * captions, count);
#pragma omp simd
    for (int64_t l = 0; l < LANES; l++) {
      weight[l] = power(raised(s[l], slope) * factor[l]);
    }
    near[j] = s;
    lanes there = some(said + j * captions, count);
    weights[j] = some(weight, LANES) * there;
    total += weights[j];
    if (kind) {
      lanes trust = there;
      if (kind == 2)
        for (int64_t l = 0; l < LANES; l++) trust[l] = sqrtf(weights[j][l]);
      counted += trust;
      average += weights[j] * trust;
    }
  }
  for (int64_t j = 0; j < places; j++) {
    if (kind)
      for (int64_t l = 0; l < LANES; l++)
        if (!(weights[j][l] * counted[l] > average[l] * (1.0f - tie))) weights[j][l] = 0.0f;
    const float *inner = kin + j * places * captions;
    lanes context[2] = {{0}};
    int64_t o = 0;
    for (; o + 2 <= j; o += 2) {
      context[0] += some(inner + o * captions, count) * weights[o];
      context[1] += some(inner + (o + 1) * captions, count) * weights[o + 1];
    }
    for (; o < j; o++) context[0] += some(inner + o * captions, count) * weights[o];
    squared += weights[j] * (2.0f * (context[0] + context[1]) +
                             some(inner + j * captions, count) * weights[j]);
    matched += weights[j] * near[j];
  }
  for (int64_t l = 0; l < (count < LANES ? count : LANES); l++)
    cosines[l] = cosine(matched[l], squared[l], norm, least * total[l]);
}

/* The same, regions asking: `cosines` [images, regions, captions] with the words they attend to. `kin` [places,
   places, captions] are inner products of a caption's words, `said` [places, captions] is 0 where a word is
   padding, `norms` [images, regions] are of regions. `rooms` has (2 · LANES + captions) · places. */
void region_cosines(float *sims, const float *factors, const float *kin, const float *real,
                    const float *said, const float *norms, float *cosines, float *rooms, int64_t images,
                    int64_t regions, int64_t places, int64_t captions, float slope, float scale,
                    float least, float tie, int kind) {
  const int64_t all_words = places * captions;
  lanes *weights = (lanes *)rooms, *near = weights + places;
  float *lengths = (float *)(near + places);
  times_factors(sims, factors, images * regions, all_words);
  for (int64_t i = 0; i < images; i++) {
    const float *here = sims + i * regions * all_words, *shown = real ? real + i * regions : 0;
    for (int64_t m = 0; m < all_words; m++) lengths[m] = 0.0f;
    for (int64_t k = 0; k < regions; k++) {
      const float *restrict row = here + k * all_words;
      if (shown && shown[k] == 0.0f) continue;
#pragma omp simd
      for (int64_t m = 0; m < all_words; m++) {
        float r = raised(row[m], slope);
        lengths[m] += r * r;
      }
    }
#pragma omp simd
    for (int64_t m = 0; m < all_words; m++) lengths[m] = scale / divisor(lengths[m], least, kind);
    for (int64_t k = 0; k < regions; k++) {
      float *out = cosines + (i * regions + k) * captions;
      if (shown && shown[k] == 0.0f) {
        memset(out, 0, 4 * captions);
        continue;
      }
      for (int64_t q = 0; q < captions; q += LANES)
        sentence(here + k * all_words + q, kin + q, said + q, lengths + q, norms[i * regions + k],
                 places, captions, captions - q, slope, least, tie, kind, weights, near, out + q);
    }
  }
}
