// Thread scope: the running softmax in base 2, and what a row may see.
//
// A state is (maximum m, sum l, weighted sum acc) of scores already multiplied by log2(e). Nothing seen yet is
// m = -inf, l = 0. Two states combine by bringing both to the larger maximum; an empty one changes nothing.
#pragma once
#include "kvpager/params.cuh"
#include "kvpager/thread.cuh"

namespace kvpager {

// The maximum to subtract: 0 while nothing was seen, so that -inf - -inf never happens.
__device__ __forceinline__ float finite_base(float maximum) {
  return maximum == minus_infinity() ? 0.f : maximum;
}

// One query row of a sequence: `row` counts (token, head of the group) pairs, heads fastest.
struct RowView {
  int token;     // within the sequence, 0-based
  int head;      // query head
  int position;  // of the token in its sequence; negative when the context is shorter than the query
  int begin;     // visible positions are [begin, end)
  int end;
};

__device__ __forceinline__ RowView row_view(const AttentionParams& p, int row, int kv_head, int query_len,
                                            int context_len) {
  RowView view;
  view.token = row / p.group;
  view.head = kv_head * p.group + (row - view.token * p.group);
  view.position = context_len - query_len + view.token;
  view.end = p.causal ? view.position + 1 : context_len;
  view.begin = p.window > 0 ? view.position + 1 - p.window : 0;
  if (view.begin < 0) view.begin = 0;
  return view;
}

// Raw dot product -> base-2 score: scale, soft cap, then ALiBi by distance.
__device__ __forceinline__ float score(const AttentionParams& p, float dot, float scale, float slope, int distance) {
  float value = dot * scale;
  if (p.softcap > 0.f) value = p.softcap * tanhf(value / p.softcap);
  return (value + slope * static_cast<float>(distance)) * kLog2E;
}

// Running maxima, in magnitude and base 2, from which a row with an fp32 output has its scores computed in fp64. A
// score of 20 in fp32 is off by 1e-6 from its rounding alone, and its weight by as much.
constexpr float kExactAbove = 4.f * kLog2E;

// 1 / x in fp64 for a positive x of fp32's range: one step of Newton's from fp32.
__device__ __forceinline__ double exact_reciprocal(double x) {
  const double guess = 1.f / static_cast<float>(x);
  return guess * (2.0 - x * guess);
}

// tanh in fp64 within 1e-12, in few registers and without a call: (1 - e) / (1 + e) with e = exp(-2 |x|).
__device__ __forceinline__ double exact_tanh(double x) {
  const double y = fmax(-2.0 * fabs(x), -40.0), n = rint(y * 1.4426950408889634);
  const double r = fma(n, -0.6931471805599453, y);  // |r| < 0.35
  double e = 1.0;
#pragma unroll 1
  for (float i = 11.f; i > 0.f; i -= 1.f) e = fma(r * exact_reciprocal(i), e, 1.0);  // Taylor's series
  e = ldexp(e, static_cast<int>(n));
  return copysign((1.0 - e) * exact_reciprocal(1.0 + e), x);
}

// `score` of a scaled product in fp64.
__device__ __forceinline__ double exact_score(const AttentionParams& p, double value, float slope, int distance) {
  if (p.softcap > 0.f) value = p.softcap * exact_tanh(value * exact_reciprocal(p.softcap));
  return (value + static_cast<double>(slope) * distance) * 1.4426950408889634;
}

// Adds the row's attention sink, a score that weighs but carries no value. Call once for a row.
__device__ __forceinline__ void add_sink(float sink_score, float& maximum, float& sum, float& rescale) {
  const float with_sink = fmaxf(maximum, sink_score);
  const float base = finite_base(with_sink);
  rescale = fast_exp2(maximum - base);
  sum = sum * rescale + fast_exp2(sink_score - base);
  maximum = with_sink;
}

// Natural log-sum-exp of a state; -inf when nothing was seen.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) {
  return sum > 0.f ? (maximum + fast_log2(sum)) * kLn2 : minus_infinity();
}

}  // namespace kvpager
