// Designs of bfloat16 decode attention on one core, beside a loop that only reads: what limits the kernel?
//
//     c++ -O3 -march=sapphirerapids -std=c++17 benches/python/attention_designs.cpp -o designs && ./designs
//
// Batch 32, context 1,024, 32 query and 8 KV heads of 128, blocks of 16 in shuffled order, 134 MB of keys and values
// in huge pages. Times are the thread's processor time, the best of 30 rounds in turn. Needs AVX512-BF16 and AMX.

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

using Element = uint16_t;
constexpr int kSequences = 32, kContext = 1024, kHeads = 8, kGroup = 4, kDim = 128, kBlock = 16;
constexpr size_t kToken = kHeads * kDim, kBlockElements = kBlock * kToken;

enum class Scores { kFma, kDotProduct, kAmx };
enum class Fetch { kNextHeadT1, kNextHeadT0, kNextHeadNta, kMemoryOrder, kNone };

struct Arrays {
    const Element *query, *keys, *values;
    const int* table;
    float* out;
};

struct Scratch {
    alignas(64) uint32_t pairs[kHeads][4 * 16 * kGroup];  // the query as AMX wants it
    alignas(64) float query[kHeads][kGroup][kDim];        // of each 32 elements first the even ones
    alignas(64) float acc[kHeads][kGroup][kDim];
    alignas(64) float scores[kBlock * kGroup];
    float maximum[kHeads][kGroup], sum[kHeads][kGroup];
};

float widen(Element bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// e^x for x <= 0, as the Rust kernels have it.
inline __m512 exp_negative(__m512 x) {
    const __m512 y = _mm512_max_ps(_mm512_set1_ps(-87.3f), x);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.442695041f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.6933594f), y);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.1219444e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691e-4f);
    for (float c : {1.3981999e-3f, 8.333452e-3f, 4.1665796e-2f, 1.6666665e-1f, 5e-1f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.f));
    return _mm512_scalef_ps(p, n);
}

inline void split(const Element* from, __m512& even, __m512& odd) {
    const __m512i bits = _mm512_loadu_si512(from);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))));
}

template <Fetch kFetch>
inline void fetch(const Element* next_head, const Element* in_order) {
    if (kFetch == Fetch::kNextHeadT1) _mm_prefetch((const char*)next_head, _MM_HINT_T1);
    if (kFetch == Fetch::kNextHeadT0) _mm_prefetch((const char*)next_head, _MM_HINT_T0);
    if (kFetch == Fetch::kNextHeadNta) _mm_prefetch((const char*)next_head, _MM_HINT_NTA);
    if (kFetch == Fetch::kMemoryOrder) _mm_prefetch((const char*)in_order, _MM_HINT_T1);
}

void configure_tiles() {
    struct __attribute__((packed)) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {16, 16, 16, 16, 16, 64, 64};  // scores, four of the query, two of keys
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
}

void start_sequence(const Element* query, Scratch& s) {
    std::memset(s.acc, 0, sizeof s.acc);
    for (int h = 0; h < kHeads; ++h)
        for (int g = 0; g < kGroup; ++g) {
            const Element* row = query + (h * kGroup + g) * kDim;
            s.maximum[h][g] = -INFINITY;
            s.sum[h][g] = 0;
            for (int d = 0; d < kDim; d += 2) {
                std::memcpy(&s.pairs[h][d / 2 * kGroup + g], row + d, 4);
                s.query[h][g][d / 32 * 32 + d % 32 / 2] = widen(row[d]);
                s.query[h][g][d / 32 * 32 + 16 + d % 32 / 2] = widen(row[d + 1]);
            }
        }
}

// Products of 16 keys and 4 query rows, [key][row].
template <Scores kScores, Fetch kFetch>
void multiply_keys(const Element* query, const Element* keys, const Element* next, const Element* in_order, int head,
                   Scratch& s) {
    if (kScores == Scores::kAmx) {
        for (int t = 0; t < kBlock; ++t)
            for (int d = 0; d < kDim; d += 32) fetch<kFetch>(next + t * kToken + d, in_order + t * kDim + d);
        const uint32_t* pairs = s.pairs[head];
        _tile_zero(0);
        _tile_loadd(1, pairs, 16);
        _tile_loadd(2, pairs + 64, 16);
        _tile_loadd(3, pairs + 128, 16);
        _tile_loadd(4, pairs + 192, 16);
        _tile_loadd(5, keys, kToken * 2);
        _tile_dpbf16ps(0, 5, 1);
        _tile_loadd(6, keys + 32, kToken * 2);
        _tile_dpbf16ps(0, 6, 2);
        _tile_loadd(5, keys + 64, kToken * 2);
        _tile_dpbf16ps(0, 5, 3);
        _tile_loadd(6, keys + 96, kToken * 2);
        _tile_dpbf16ps(0, 6, 4);
        _tile_stored(0, s.scores, 16);
        return;
    }
    for (int first = 0; first < kBlock; first += 4) {
        __m512 acc[4][4];
        for (auto& row : acc)
            for (auto& sum : row) sum = _mm512_setzero_ps();
        for (int d = 0; d < kDim; d += 32) {
            __m512 even[4], odd[4];
            for (int t = 0; t < 4; ++t) {
                fetch<kFetch>(next + (first + t) * kToken + d, in_order + (first + t) * kDim + d);
                split(keys + (first + t) * kToken + d, even[t], odd[t]);
            }
            for (int g = 0; g < kGroup; ++g) {
                if (kScores == Scores::kDotProduct) {
                    const __m512bh q = (__m512bh)_mm512_loadu_si512(query + (head * kGroup + g) * kDim + d);
                    for (int t = 0; t < 4; ++t) {
                        const __m512bh k = (__m512bh)_mm512_loadu_si512(keys + (first + t) * kToken + d);
                        acc[g][t] = _mm512_dpbf16_ps(acc[g][t], q, k);
                    }
                    continue;
                }
                const __m512 q0 = _mm512_load_ps(&s.query[head][g][d]);
                const __m512 q1 = _mm512_load_ps(&s.query[head][g][d + 16]);
                for (int t = 0; t < 4; ++t) {
                    acc[g][t] = _mm512_fmadd_ps(q0, even[t], acc[g][t]);
                    acc[g][t] = _mm512_fmadd_ps(q1, odd[t], acc[g][t]);
                }
            }
        }
        for (int t = 0; t < 4; ++t)
            for (int g = 0; g < kGroup; ++g) s.scores[(first + t) * kGroup + g] = _mm512_reduce_add_ps(acc[g][t]);
    }
}

// Scores become weights; returns the factors of what the rows had accumulated, four times over.
__m512 weigh(int head, Scratch& s) {
    const auto over_keys = [](__m512 x, auto combine) {
        x = combine(x, _mm512_shuffle_f32x4(x, x, 0x4e));
        return combine(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    };
    const auto larger = [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); };
    const auto plus = [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); };
    const __m512 scale = _mm512_set1_ps(1 / std::sqrt(float(kDim)));
    __m512 x[4], highest = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) highest = larger(highest, x[i] = _mm512_mul_ps(_mm512_load_ps(s.scores + 16 * i), scale));
    const __m128 old = _mm_loadu_ps(s.maximum[head]);
    const __m128 now = _mm_max_ps(old, _mm512_castps512_ps128(over_keys(highest, larger)));
    _mm_storeu_ps(s.maximum[head], now);
    for (int i = 0; i < 4; ++i) {
        x[i] = exp_negative(_mm512_sub_ps(x[i], _mm512_broadcast_f32x4(now)));
        total = _mm512_add_ps(total, x[i]);
        _mm512_store_ps(s.scores + 16 * i, x[i]);
    }
    const __m512 rescale = exp_negative(_mm512_broadcast_f32x4(_mm_max_ps(_mm_sub_ps(old, now), _mm_set1_ps(-87.f))));
    const __m128 sum = _mm_fmadd_ps(_mm_loadu_ps(s.sum[head]), _mm512_castps512_ps128(rescale),
                                    _mm512_castps512_ps128(over_keys(total, plus)));
    _mm_storeu_ps(s.sum[head], sum);
    return rescale;
}

template <Fetch kFetch>
void multiply_values(const Element* values, const Element* next, const Element* in_order, __m512 rescale, int head,
                     Scratch& s) {
    float factors[16];
    _mm512_storeu_ps(factors, rescale);
    for (int d = 0; d < kDim; d += 64) {
        __m512 acc[4][4];
        for (auto& row : acc)
            for (auto& sum : row) sum = _mm512_setzero_ps();
        for (int t = 0; t < kBlock; ++t) {
            __m512 x[4];
            for (int i = 0; i < 2; ++i) {
                fetch<kFetch>(next + t * kToken + d + 32 * i, in_order + t * kDim + d + 32 * i);
                split(values + t * kToken + d + 32 * i, x[2 * i], x[2 * i + 1]);
            }
            for (int g = 0; g < kGroup; ++g) {
                const __m512 weight = _mm512_set1_ps(s.scores[t * kGroup + g]);
                for (int i = 0; i < 4; ++i) acc[g][i] = _mm512_fmadd_ps(weight, x[i], acc[g][i]);
            }
        }
        for (int g = 0; g < kGroup; ++g)
            for (int i = 0; i < 4; ++i) {
                float* at = &s.acc[head][g][d + 16 * i];
                _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_set1_ps(factors[g]), acc[g][i]));
            }
    }
}

template <Scores kScores, Fetch kFetch>
void decode(const Arrays& a) {
    static Scratch s;
    if (kScores == Scores::kAmx) configure_tiles();
    constexpr int kBlocks = kContext / kBlock;
    for (int sequence = 0; sequence < kSequences; ++sequence) {
        const Element* query = a.query + size_t(sequence) * kHeads * kGroup * kDim;
        start_sequence(query, s);
        const int* table = a.table + sequence * kBlocks;
        for (int block = 0; block < kBlocks; ++block) {
            const bool last = sequence + 1 == kSequences && block + 1 == kBlocks;
            const size_t at = table[block] * kBlockElements, next = table[last ? block : block + 1] * kBlockElements;
            for (int h = 0; h < kHeads; ++h) {
                const size_t own = at + h * kDim, following = h + 1 < kHeads ? own + kDim : next;
                const size_t in_order = next + h * kBlock * kDim;
                multiply_keys<kScores, kFetch>(query, a.keys + own, a.keys + following, a.keys + in_order, h, s);
                const __m512 rescale = weigh(h, s);
                multiply_values<kFetch>(a.values + own, a.values + following, a.values + in_order, rescale, h, s);
            }
        }
        for (int h = 0; h < kHeads; ++h)
            for (int g = 0; g < kGroup; ++g)
                for (int d = 0; d < kDim; ++d)
                    a.out[((size_t(sequence) * kHeads + h) * kGroup + g) * kDim + d] =
                        s.acc[h][g][d / 32 * 32 + d % 2 * 16 + d % 32 / 2] / s.sum[h][g];
    }
    if (kScores == Scores::kAmx) _tile_release();
}

// Reads all blocks in the table's order, or in memory's without a table.
int read_all(const Arrays& a, const int* table) {
    __m512i sums[4] = {};
    for (int block = 0; block < kSequences * kContext / kBlock; ++block)
        for (const Element* array : {a.keys, a.values}) {
            const Element* from = array + size_t(table ? table[block] : block) * kBlockElements;
            for (size_t i = 0; i < kBlockElements; i += 128)
                for (int j = 0; j < 4; ++j) sums[j] = _mm512_add_epi32(sums[j], _mm512_load_si512(from + i + 32 * j));
        }
    return _mm512_reduce_add_epi32(
        _mm512_add_epi32(_mm512_add_epi32(sums[0], sums[1]), _mm512_add_epi32(sums[2], sums[3])));
}

Element* allocate(size_t count, std::mt19937& random) {
    auto* array = static_cast<Element*>(std::aligned_alloc(1 << 21, count * sizeof(Element)));
    madvise(array, count * sizeof(Element), MADV_HUGEPAGE);
    std::normal_distribution<float> normal;
    std::vector<Element> pool(1 << 16);
    for (auto& element : pool) {
        const float value = normal(random);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        element = Element((bits + 0x8000) >> 16);
    }
    for (size_t i = 0; i < count; ++i) array[i] = pool[(i * 7919 + i / 65536) & 65535];
    return array;
}

double processor_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

}  // namespace

int main() {
    constexpr int kUseTiles = 0x1023, kTileData = 18;  // arch_prctl: allow the tile registers
    if (syscall(SYS_arch_prctl, kUseTiles, kTileData) != 0) return std::puts("this kernel grants no AMX"), 1;
    std::mt19937 random(1);
    const size_t count = size_t(kSequences) * kContext * kToken, outputs = kSequences * kHeads * kGroup * kDim;
    std::vector<int> shuffled(kSequences * kContext / kBlock), resident(shuffled.size());
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (size_t i = 0; i < resident.size(); ++i) resident[i] = int(i % 16);
    std::vector<float> plain(outputs), out(outputs);
    Arrays a{allocate(1 << 20, random), allocate(count, random), allocate(count, random), shuffled.data(), out.data()};

    Arrays near = a;
    near.table = resident.data();
    volatile int sink = 0;
    const std::pair<std::string, std::function<void()>> designs[] = {
        {"read in memory order", [&] { sink = read_all(a, nullptr); }},
        {"read in table order", [&] { sink = read_all(a, a.table); }},
        {"FMA, next head to L2 (as the kernel does)", [&] { decode<Scores::kFma, Fetch::kNextHeadT1>(a); }},
        {"FMA, next head to L1", [&] { decode<Scores::kFma, Fetch::kNextHeadT0>(a); }},
        {"FMA, next head non-temporal", [&] { decode<Scores::kFma, Fetch::kNextHeadNta>(a); }},
        {"FMA, next block in memory order to L2", [&] { decode<Scores::kFma, Fetch::kMemoryOrder>(a); }},
        {"FMA, no prefetch", [&] { decode<Scores::kFma, Fetch::kNone>(a); }},
        {"AVX512-BF16 dot products, next head to L2", [&] { decode<Scores::kDotProduct, Fetch::kNextHeadT1>(a); }},
        {"AMX scores, next head to L2", [&] { decode<Scores::kAmx, Fetch::kNextHeadT1>(a); }},
        {"FMA, blocks that stay in L2", [&] { decode<Scores::kFma, Fetch::kNextHeadT1>(near); }},
        {"AMX scores, blocks that stay in L2", [&] { decode<Scores::kAmx, Fetch::kNextHeadT1>(near); }},
    };
    constexpr size_t kDesigns = sizeof designs / sizeof designs[0];
    double best[kDesigns];
    std::fill(best, best + kDesigns, 1e9);
    for (int round = 0; round < 30; ++round)
        for (size_t i = 0; i < kDesigns; ++i) {
            const double start = processor_seconds();
            designs[i].second();
            best[i] = std::min(best[i], processor_seconds() - start);
        }
    decode<Scores::kFma, Fetch::kNone>(a);
    plain = out;
    decode<Scores::kAmx, Fetch::kNone>(a);
    float difference = 0;
    for (size_t i = 0; i < outputs; ++i) difference = std::max(difference, std::fabs(plain[i] - out[i]));
    std::puts("| design | ms | share of the read loop |\n| --- | --- | --- |");
    for (size_t i = 0; i < kDesigns; ++i)
        std::printf("| %s | %.2f | %.2f |\n", designs[i].first.c_str(), best[i] * 1e3, best[0] / best[i]);
    std::printf("\nLargest difference between AMX and FMA: %.1e.\n", difference);
}
