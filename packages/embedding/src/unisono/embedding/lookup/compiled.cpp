// The operations on rows for CPUs, as lookup/kernels.py has them in torch's operations, in one pass over each row.
//
// compiled.py compiles this file on first use and calls the functions at its end by ctypes: pointers and sizes, nothing of torch.
// Results do not depend on the number of threads or on the instruction set: each row is summed by one thread in the order of
// its positions, no product is fused with a sum (-ffp-contract=off), and sums along a row have a fixed number of lanes.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))  // chosen when the library is loaded
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))  // so that a clone has its own copy

namespace {

constexpr int64_t LINE = 64;          // bytes that a prefetch brings
constexpr int64_t LINES = 8;          // prefetched of a row at most; the processor goes on by itself
constexpr int64_t READ_AHEAD = 64;    // rows between the prefetch of a row and its use, measured
constexpr int64_t GRADIENTS_AHEAD = 32;
constexpr int64_t UPDATE_AHEAD = 12;
constexpr int64_t GRAIN = 1 << 15;    // numbers for which a thread is worth its start
constexpr int LANES = 16;             // of a sum along a row
constexpr int NO_MEMORY = -2;         // returned to compiled.py

// Call work(begin, end, part) for as many equal parts of 0..n as threads are worth starting.
template <class Work>
void in_parallel(int64_t n, int64_t numbers, int threads, const Work& work) {
    int64_t parts = std::max<int64_t>(1, std::min<int64_t>({threads, n, numbers / GRAIN}));
    std::vector<std::thread> started;
    started.reserve(parts);
    std::atomic<bool> no_memory{false};  // an exception that leaves a thread would end the process
    for (int64_t part = parts - 1; part >= 0; part--) {
        auto run = [&work, &no_memory, n, parts, part] {
            try {
                work(n * part / parts, n * (part + 1) / parts, part);
            } catch (const std::bad_alloc&) {
                no_memory = true;
            }
        };
        if (part > 0) {
            try {
                started.emplace_back(run);
                continue;
            } catch (const std::exception&) {  // the system allows no more threads
            }
        }
        run();
    }
    for (std::thread& thread : started) thread.join();
    if (no_memory) throw std::bad_alloc();
}

// What call() returns, or NO_MEMORY: exceptions must not reach the caller, which is not C++.
template <class Call>
int64_t or_no_memory(const Call& call) {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

template <class T>
INLINE void prefetch(const T* row, int64_t width) {
    const char* start = reinterpret_cast<const char*>(row);
    int64_t bytes = std::min<int64_t>(width * sizeof(T), LINES * LINE);
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(start + at);
}

// Numbers without their duplicates, by a radix sort.

template <class Key>
struct Entry {
    Key key, position;
};

constexpr int DIGIT = 11;  // bits: the places of all digits fit into the first cache

// Sort entries by key, keeping the order of equal ones. Returns `entries` or `other`, which are both overwritten.
template <class Key>
Entry<Key>* sort_by_key(Entry<Key>* entries, Entry<Key>* other, int64_t n, int bits, int threads) {
    int parts = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, n / GRAIN)));
    std::vector<int64_t> places(static_cast<size_t>(parts) << DIGIT);
    for (int shift = 0; shift < bits; shift += DIGIT) {
        auto digit = [shift](Key key) { return (key >> shift) & ((1 << DIGIT) - 1); };
        std::fill(places.begin(), places.end(), 0);
        in_parallel(n, parts * GRAIN, parts, [&](int64_t begin, int64_t end, int64_t part) {
            int64_t* counts = &places[static_cast<size_t>(part) << DIGIT];
            for (int64_t i = begin; i < end; i++) counts[digit(entries[i].key)]++;
        });
        int64_t before = 0;
        for (int d = 0; d < 1 << DIGIT; d++)
            for (int part = 0; part < parts; part++) {
                int64_t count = places[(static_cast<size_t>(part) << DIGIT) + d];
                places[(static_cast<size_t>(part) << DIGIT) + d] = before;
                before += count;
            }
        in_parallel(n, parts * GRAIN, parts, [&](int64_t begin, int64_t end, int64_t part) {
            int64_t* own = &places[static_cast<size_t>(part) << DIGIT];
            for (int64_t i = begin; i < end; i++) other[own[digit(entries[i].key)]++] = entries[i];
        });
        std::swap(entries, other);
    }
    return entries;
}

template <class Key, class Number>
int64_t deduplicate(const Number* numbers, int64_t n, int bits, Number* unique, int64_t* order, int64_t* starts,
                    int64_t* counts, int threads) {
    thread_local std::unique_ptr<Entry<Key>[]> scratch;  // kept: new memory would cost a page fault for each 4 KiB
    thread_local int64_t capacity = 0;
    if (capacity < 2 * n) {
        scratch.reset(new Entry<Key>[2 * n]);
        capacity = 2 * n;
    }
    Entry<Key>* entries = scratch.get();
    for (int64_t i = 0; i < n; i++) entries[i] = {static_cast<Key>(numbers[i]), static_cast<Key>(i)};
    entries = sort_by_key(entries, entries + n, n, bits, threads);
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        order[i] = static_cast<int64_t>(entries[i].position);
        if (i == 0 || entries[i].key != entries[i - 1].key) {
            unique[found] = static_cast<Number>(entries[i].key);
            starts[found++] = i;
        }
    }
    for (int64_t k = 0; k < found; k++) counts[k] = (k + 1 < found ? starts[k + 1] : n) - starts[k];
    return found;
}

// Returns how many different numbers there are, -1 if one of them is negative, or NO_MEMORY.
template <class Number>
int64_t deduplicate_any(const Number* numbers, int64_t n, Number* unique, int64_t* order, int64_t* starts, int64_t* counts,
                        int threads) {
    Number low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        low = std::min(low, numbers[i]);
        high = std::max(high, numbers[i]);
    }
    if (low < 0) return -1;
    int bits = 0;
    while (bits < 63 && (static_cast<int64_t>(high) >> bits) > 0) bits++;
    return bits <= 32 && n < (int64_t{1} << 32)
               ? deduplicate<uint32_t>(numbers, n, bits, unique, order, starts, counts, threads)
               : deduplicate<uint64_t>(numbers, n, bits, unique, order, starts, counts, threads);
}

// The ids of all features become rows, in one tensor.

struct Feature {  // compiled.py has the same fields
    const void* ids;
    int64_t id_count;
    int64_t id_bytes;  // of one id: 4 or 8
    const void* offsets;
    int64_t offset_count;
    int64_t offset_bytes;
    int64_t last_id;
    int64_t chunk_size;     // row = id + shifts[id / chunk_size]
    const int64_t* shifts;
    int64_t chunks;
    int64_t dropped;        // an id that is left out; -1: none
    void* lengths;          // out: of the bags, without the ids that are left out
    int64_t kept;           // out: how many ids are not left out
};

template <class Number>
INLINE bool none_above(const void* numbers, int64_t n, int64_t last) {
    bool bad = false;
    for (int64_t i = 0; i < n; i++) {
        const Number number = static_cast<const Number*>(numbers)[i];
        bad |= number < 0 || static_cast<int64_t>(number) > last;
    }
    return !bad;
}

template <class Number>
INLINE bool rises(const void* numbers, int64_t n, int64_t last) {
    const Number* x = static_cast<const Number*>(numbers);
    bool falls = false;
    for (int64_t i = 1; i < n; i++) falls |= x[i] < x[i - 1];
    return !falls && n > 0 && x[0] == 0 && static_cast<int64_t>(x[n - 1]) == last;
}

CLONES static bool is_valid(const Feature& x) {
    return (x.id_bytes == 4 ? none_above<int32_t>(x.ids, x.id_count, x.last_id)
                            : none_above<int64_t>(x.ids, x.id_count, x.last_id)) &&
           (x.offset_bytes == 4 ? rises<int32_t>(x.offsets, x.offset_count, x.id_count)
                                : rises<int64_t>(x.offsets, x.offset_count, x.id_count));
}

template <class Id, class Row>
INLINE void write_rows(const Feature& x, Row* rows) {
    const Id* ids = static_cast<const Id*>(x.ids);
    if (x.chunks == 1) {
        const int64_t shift = x.shifts[0];
        for (int64_t i = 0; i < x.id_count; i++) rows[i] = static_cast<Row>(static_cast<int64_t>(ids[i]) + shift);
    } else if (x.chunk_size > 1 && x.chunk_size <= UINT32_MAX && x.last_id <= UINT32_MAX) {
        const uint64_t inverse = UINT64_MAX / static_cast<uint64_t>(x.chunk_size) + 1;  // a product is faster than a division
        for (int64_t i = 0; i < x.id_count; i++) {
            const uint64_t id = static_cast<uint64_t>(ids[i]);
            rows[i] = static_cast<Row>(id + x.shifts[static_cast<uint64_t>((static_cast<unsigned __int128>(id) * inverse) >> 64)]);
        }
    } else {
        for (int64_t i = 0; i < x.id_count; i++)
            rows[i] = static_cast<Row>(static_cast<int64_t>(ids[i]) + x.shifts[static_cast<int64_t>(ids[i]) / x.chunk_size]);
    }
}

template <class Id, class Offset, class Row>
INLINE void join_feature(Feature& x, Row* rows) {
    const Id* ids = static_cast<const Id*>(x.ids);
    const Offset* offsets = static_cast<const Offset*>(x.offsets);
    Row* lengths = static_cast<Row*>(x.lengths);
    for (int64_t b = 0; b + 1 < x.offset_count; b++) lengths[b] = static_cast<Row>(offsets[b + 1] - offsets[b]);
    write_rows<Id>(x, rows);
    x.kept = x.id_count;
    if (x.dropped < 0) return;
    x.kept = 0;
    for (int64_t b = 0; b + 1 < x.offset_count; b++) {
        const int64_t before = x.kept;
        for (int64_t i = offsets[b]; i < static_cast<int64_t>(offsets[b + 1]); i++)
            if (static_cast<int64_t>(ids[i]) != x.dropped) rows[x.kept++] = rows[i];
        lengths[b] = static_cast<Row>(x.kept - before);
    }
}

template <class Row>
INLINE void join_any(Feature& x, Row* rows) {
    if (x.id_bytes == 4)
        x.offset_bytes == 4 ? join_feature<int32_t, int32_t>(x, rows) : join_feature<int32_t, int64_t>(x, rows);
    else
        x.offset_bytes == 4 ? join_feature<int64_t, int32_t>(x, rows) : join_feature<int64_t, int64_t>(x, rows);
}

CLONES static void join_into(Feature& x, int32_t* rows) { join_any(x, rows); }
CLONES static void join_into_wide(Feature& x, int64_t* rows) { join_any(x, rows); }

// Sums of rows, in registers.

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
    typedef float type __attribute__((vector_size(64), aligned(4), may_alias));  // of any width of the processor's registers
};
template <>
struct Lanes<double> {
    typedef double type __attribute__((vector_size(64), aligned(8), may_alias));
};

// Write the sum of N vectors of the rows index[first..last) to `out`; all three begin at the first of their columns.
template <class T, int N, class Index>
INLINE void sum_vectors(const T* rows, int64_t width, const Index* index, const T* weights, int64_t first, int64_t last, T* out) {
    typedef typename Lanes<T>::type Vector;
    Vector sums[N] = {};
    for (int64_t p = first; p < last; p++) {
        const Vector* row = reinterpret_cast<const Vector*>(rows + static_cast<int64_t>(index[p]) * width);
        if (weights)
            for (int v = 0; v < N; v++) sums[v] += weights[p] * row[v];
        else
            for (int v = 0; v < N; v++) sums[v] += row[v];
    }
    for (int v = 0; v < N; v++) reinterpret_cast<Vector*>(out)[v] = sums[v];
}

// out = the sum of rows[index[p]] * weights[p] for p from first to last. `positions`: the length of `index`; `ahead`: by how many
// positions rows are prefetched.
template <class T, class Index>
INLINE void sum_rows(const T* rows, int64_t width, const Index* index, const T* weights, int64_t first, int64_t last,
                     int64_t positions, int64_t ahead, T* out) {
    constexpr int64_t LANES_OF_T = 64 / sizeof(T), WIDE = 4;
    for (int64_t p = first; p < last; p++)
        if (p + ahead < positions) prefetch(rows + static_cast<int64_t>(index[p + ahead]) * width, width);
    int64_t j = 0;
    for (; j + WIDE * LANES_OF_T <= width; j += WIDE * LANES_OF_T)
        sum_vectors<T, WIDE>(rows + j, width, index, weights, first, last, out + j);
    for (; j + LANES_OF_T <= width; j += LANES_OF_T)
        sum_vectors<T, 1>(rows + j, width, index, weights, first, last, out + j);
    for (; j < width; j++) {
        T sum = 0;
        for (int64_t p = first; p < last; p++) {
            const T value = rows[static_cast<int64_t>(index[p]) * width + j];
            sum += weights ? weights[p] * value : value;
        }
        out[j] = sum;
    }
}

struct Bags {  // compiled.py has the same fields
    const void* rows;
    int64_t width;
    const void* index;      // of rows
    int64_t positions;      // length of `index`
    const int64_t* starts;  // bag b has the positions from starts[b] to starts[b + 1]
    int64_t bags;
    const void* weights;    // of the positions; null: all 1
    void* out;              // (bags, width)
};

template <class T, class Index>
INLINE void sum_bags(const Bags& x, int64_t begin, int64_t end) {
    const T* rows = static_cast<const T*>(x.rows);
    const Index* index = static_cast<const Index*>(x.index);
    for (int64_t bag = begin; bag < end; bag++) {
        const int64_t last = bag + 1 < x.bags ? x.starts[bag + 1] : x.positions;
        T* out = static_cast<T*>(x.out) + bag * x.width;
        const T* weights = static_cast<const T*>(x.weights);
        sum_rows(rows, x.width, index, weights, x.starts[bag], last, x.positions, READ_AHEAD, out);
    }
}

// Sums of gradients and the step of an optimizer, row by row.

enum Rule { SGD = 0, ROWWISE_ADAGRAD = 1, ADAGRAD = 2, ADAM = 3 };

struct Update {  // compiled.py has the same fields
    void* weight;           // (rows, width), changed in place
    void* state0;           // Adagrad's sum, or Adam's mean
    void* state1;           // Adam's square
    int64_t width;
    const void* rows;       // of `weight`: different ones
    int64_t begin, end;     // of `rows`: which of them change
    const void* grads;      // (any number, width)
    const int64_t* index;   // row k has the gradients index[starts[k]], ...; null: the gradient k
    int64_t positions;      // length of `index`
    const int64_t* starts;
    const int64_t* counts;
    const void* weights;    // one for each of `index`; null: all 1
    const void* divisors;   // of the sum of row k; null: all 1
    const void* squares;    // of row k: the sum of squares of its gradient over all its columns; null: of these columns
    int64_t rule;
    double factor;          // of the sums
    double weight_decay;
    double rate;
    double eps;
    double beta1, beta2;
    double columns;         // of whole rows
};

template <class T>
INLINE T sum_of_squares(const T* __restrict__ x, int64_t width) {
    T lanes[LANES] = {};
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[j + lane] * x[j + lane];
    for (int lane = 0; j < width; j++, lane++) lanes[lane] += x[j] * x[j];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

template <class T>
INLINE void step(const Update& u, int64_t row, T* __restrict__ weight, T* __restrict__ sum, const T* squares) {
    const int64_t width = u.width;
    const T rate = static_cast<T>(-u.rate), eps = static_cast<T>(u.eps);
    if (u.rule == SGD) {
        for (int64_t j = 0; j < width; j++) weight[j] += sum[j] * rate;
    } else if (u.rule == ROWWISE_ADAGRAD) {
        T* total = static_cast<T*>(u.state0) + row;
        *total += (squares ? *squares : sum_of_squares(sum, width)) / static_cast<T>(u.columns);
        const T scale = T(1) / (std::sqrt(*total) + eps) * rate;
        for (int64_t j = 0; j < width; j++) weight[j] += sum[j] * scale;
    } else if (u.rule == ADAGRAD) {
        T* __restrict__ total = static_cast<T*>(u.state0) + row * width;
        for (int64_t j = 0; j < width; j++) {
            total[j] += sum[j] * sum[j];
            weight[j] += sum[j] / (std::sqrt(total[j]) + eps) * rate;
        }
    } else {
        T* __restrict__ mean = static_cast<T*>(u.state0) + row * width;
        T* __restrict__ square = static_cast<T*>(u.state1) + row * width;
        const T part = static_cast<T>(1 - u.beta1), rest = static_cast<T>(1) - part;
        const T beta2 = static_cast<T>(u.beta2), part2 = static_cast<T>(1 - u.beta2);
        const bool near = part < T(0.5);  // torch's lerp is exact at both ends
        for (int64_t j = 0; j < width; j++) {
            const T away = sum[j] - mean[j];
            mean[j] = near ? mean[j] + part * away : sum[j] - away * rest;
            square[j] = square[j] * beta2 + part2 * sum[j] * sum[j];
            weight[j] += mean[j] / (std::sqrt(square[j]) + eps) * rate;
        }
    }
}

template <class T, class Index>
INLINE void update(const Update& u, int64_t begin, int64_t end) {
    const Index* rows = static_cast<const Index*>(u.rows);
    const T* grads = static_cast<const T*>(u.grads);
    const T* weights = static_cast<const T*>(u.weights);
    const T* divisors = static_cast<const T*>(u.divisors);
    const T* squares = static_cast<const T*>(u.squares);
    const int64_t width = u.width;
    const int64_t state_width = u.rule == SGD ? 0 : u.rule == ROWWISE_ADAGRAD ? 1 : width;
    std::vector<T> buffer(width);
    T* __restrict__ sum = buffer.data();
    for (int64_t k = begin; k < end; k++) {
        if (k + UPDATE_AHEAD < end) {
            const int64_t next = static_cast<int64_t>(rows[k + UPDATE_AHEAD]);
            prefetch(static_cast<T*>(u.weight) + next * width, width);
            if (state_width) prefetch(static_cast<T*>(u.state0) + next * state_width, state_width);
            if (u.rule == ADAM) prefetch(static_cast<T*>(u.state1) + next * width, width);
        }
        if (u.index)
            sum_rows(grads, width, u.index, weights, u.starts[k], u.starts[k] + u.counts[k], u.positions, GRADIENTS_AHEAD, sum);
        else
            std::copy(grads + k * width, grads + (k + 1) * width, sum);
        const int64_t row = static_cast<int64_t>(rows[k]);
        T* __restrict__ weight = static_cast<T*>(u.weight) + row * width;
        if (divisors)
            for (int64_t j = 0; j < width; j++) sum[j] /= divisors[k];
        if (u.factor != 1)
            for (int64_t j = 0; j < width; j++) sum[j] *= static_cast<T>(u.factor);
        if (u.weight_decay != 0)
            for (int64_t j = 0; j < width; j++) sum[j] += static_cast<T>(u.weight_decay) * weight[j];
        step(u, row, weight, sum, squares ? squares + k : nullptr);
    }
}

}  // namespace

#define DEFINE(T, Index, NAME)                                                                               \
    CLONES static void sum_bags_part_##NAME(const Bags& x, int64_t begin, int64_t end) {                     \
        sum_bags<T, Index>(x, begin, end);                                                                   \
    }                                                                                                        \
    CLONES static void update_part_##NAME(const Update& x, int64_t begin, int64_t end) {                     \
        update<T, Index>(x, begin, end);                                                                     \
    }                                                                                                        \
    extern "C" int64_t sum_bags_##NAME(const Bags* x, int threads) {                                         \
        return or_no_memory([x, threads] {                                                                   \
            in_parallel(x->bags, x->positions * x->width, threads,                                           \
                        [x](int64_t begin, int64_t end, int64_t) { sum_bags_part_##NAME(*x, begin, end); }); \
            return 0;                                                                                        \
        });                                                                                                  \
    }                                                                                                        \
    extern "C" int64_t update_##NAME(const Update* x, int threads) {                                         \
        if (x->begin == x->end) return 0;                                                                    \
        return or_no_memory([x, threads] {                                                                   \
            in_parallel(x->end - x->begin, (x->end - x->begin) * x->width, threads,                          \
                        [x](int64_t begin, int64_t end, int64_t) {                                           \
                            update_part_##NAME(*x, x->begin + begin, x->begin + end);                        \
                        });                                                                                  \
            return 0;                                                                                        \
        });                                                                                                  \
    }

DEFINE(float, int32_t, float32_int32)
DEFINE(float, int64_t, float32_int64)
DEFINE(double, int32_t, float64_int32)
DEFINE(double, int64_t, float64_int64)

// Returns whether all ids and offsets are valid; if not, nothing is written.
extern "C" int join(Feature* features, int64_t count, void* rows, int64_t row_bytes) {
    if (!std::all_of(features, features + count, is_valid)) return 0;
    int64_t at = 0;
    for (int64_t k = 0; k < count; k++) {
        if (row_bytes == 4)
            join_into(features[k], static_cast<int32_t*>(rows) + at);
        else
            join_into_wide(features[k], static_cast<int64_t*>(rows) + at);
        at += features[k].kept;
    }
    return 1;
}

extern "C" int64_t deduplicate_int32(const int32_t* numbers, int64_t n, int32_t* unique, int64_t* order, int64_t* starts,
                                     int64_t* counts, int threads) {
    return or_no_memory([=] { return deduplicate_any(numbers, n, unique, order, starts, counts, threads); });
}

extern "C" int64_t deduplicate_int64(const int64_t* numbers, int64_t n, int64_t* unique, int64_t* order, int64_t* starts,
                                     int64_t* counts, int threads) {
    return or_no_memory([=] { return deduplicate_any(numbers, n, unique, order, starts, counts, threads); });
}
