// Yardsticks of attention_cpu.py, compiled by it for this machine: a read loop, and paged decode attention as one
// would write it first, left to the compiler's vectoriser. Both split their work over `threads` threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

template <class Work>
void on_threads(int threads, int items, Work work) {
    std::atomic<int> next{0};
    auto loop = [&] {
        for (int item = next++; item < items; item = next++) work(item);
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(loop);
    loop();
    for (auto& thread : others) thread.join();
}

inline float widen(float x) { return x; }
inline float widen(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

template <class Element, int DIM, int GROUP, int BLOCK>
void decode(const float* query, const Element* keys, const Element* values, const int32_t* tables, int columns,
            int sequences, int kv_heads, int context, float* out, int threads) {
    on_threads(threads, sequences * kv_heads, [=](int item) {
        int sequence = item / kv_heads, head = item % kv_heads;
        const float* q = query + (size_t(sequence) * kv_heads + head) * GROUP * DIM;
        float most[GROUP], sum[GROUP], acc[GROUP][DIM], score[GROUP][BLOCK];
        for (int g = 0; g < GROUP; ++g) most[g] = -INFINITY, sum[g] = 0;
        std::memset(acc, 0, sizeof acc);
        for (int start = 0; start < context; start += BLOCK) {
            size_t block = tables[size_t(sequence) * columns + start / BLOCK];
            const Element* k = keys + (block * BLOCK * kv_heads + head) * DIM;
            const Element* v = values + (block * BLOCK * kv_heads + head) * DIM;
            int used = std::min(BLOCK, context - start);
            for (int t = 0; t < used; ++t)
                for (int g = 0; g < GROUP; ++g) {
                    float dot = 0;
                    for (int d = 0; d < DIM; ++d) dot += q[g * DIM + d] * widen(k[size_t(t) * kv_heads * DIM + d]);
                    score[g][t] = dot * (1.0f / std::sqrt(float(DIM)));
                }
            for (int g = 0; g < GROUP; ++g) {
                float top = most[g];
                for (int t = 0; t < used; ++t) top = std::max(top, score[g][t]);
                float factor = std::exp(most[g] - top);
                most[g] = top;
                sum[g] *= factor;
                for (int d = 0; d < DIM; ++d) acc[g][d] *= factor;
                for (int t = 0; t < used; ++t) sum[g] += score[g][t] = std::exp(score[g][t] - top);
                for (int t = 0; t < used; ++t)
                    for (int d = 0; d < DIM; ++d) acc[g][d] += score[g][t] * widen(v[size_t(t) * kv_heads * DIM + d]);
            }
        }
        float* target = out + (size_t(sequence) * kv_heads + head) * GROUP * DIM;
        for (int g = 0; g < GROUP; ++g)
            for (int d = 0; d < DIM; ++d) target[g * DIM + d] = acc[g][d] / sum[g];
    });
}

}  // namespace

extern "C" {

// Sum of 32-bit words, so that nothing is skipped.
uint32_t read_words(const uint32_t* words, int64_t count, int threads) {
    const int pieces = 64;
    std::atomic<uint32_t> total{0};
    on_threads(threads, pieces, [&](int piece) {
        int64_t from = count * piece / pieces, to = count * (piece + 1) / pieces;
        uint32_t sum = 0;
        for (int64_t i = from; i < to; ++i) sum += words[i];
        total += sum;
    });
    return total;
}

void decode_f32(const float* query, const float* keys, const float* values, const int32_t* tables, int columns,
                int sequences, int kv_heads, int context, float* out, int threads) {
    decode<float, 128, 4, 16>(query, keys, values, tables, columns, sequences, kv_heads, context, out, threads);
}

void decode_bf16(const float* query, const uint16_t* keys, const uint16_t* values, const int32_t* tables, int columns,
                 int sequences, int kv_heads, int context, float* out, int threads) {
    decode<uint16_t, 128, 4, 16>(query, keys, values, tables, columns, sequences, kv_heads, context, out, threads);
}
}
