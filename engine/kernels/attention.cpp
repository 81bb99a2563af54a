// Attention over the page pool, which reads keys and values in place: kvmesh::attend_pages.
//
// Queries are multiplied by blocks of keys with a running maximum (FlashAttention-2, Dao 2023, arXiv:2307.08691). Spans of
// the context, which are whole numbers of blocks, are merged in order. A decode's spans are computed by several threads
// (flash-decoding), a prompt tile's by one. Sums are fp32 for every dtype.
//
// Batch invariance: blocks and spans start at multiples of their length, and the sums of a token's result have the same order
// whether the token is a decode or part of a prompt chunk, in any batch. So if another worker continues a stream, and computes
// its generated tokens as a prompt, it gets bitwise the same keys and values. All values must be finite: an infinite one makes
// other tokens of its chunk NaN, even those that must not see it, because 0 times infinity is NaN.
//
// Built on torch's stable ABI: it has few includes, so it compiles in seconds, and the library works with later releases.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "products.h"

void adapt_threads();  // cores.cpp

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t SPAN = 256;       // tokens of context that one decode task reads
constexpr int64_t TILE_ROWS = 128;  // query rows of a prompt tile, at least the heads of one token
constexpr float LOWEST = -1e30f;    // the maximum of no scores; finite, so that differences with it are not NaN

// The arguments of one call.
template <typename T>
struct Call {
  const T *query, *key, *value;  // [heads or kv_heads, tokens, dim], each row of dim contiguous
  int64_t query_head, query_token, key_head, key_token, value_head, value_token;  // strides
  T* pool;         // [pages, kv_heads, layers, 2, page_size, dim]; null if the pages hold 8-bit floats
  uint8_t* bytes;  // the pool of 8-bit floats, or null
  T* out;          // [tokens, heads, dim]
  const int32_t *starts, *contexts, *tables;  // [requests + 1], [requests], [requests, table_len]
  int64_t requests, table_len, tokens, heads, kv_heads, group, layers, page_size, dim, layer;
  float scaling, softcap;
  int64_t window;
  const float* sinks;  // [heads], or null
  bool by_tiles;       // for all products of decodes and prompts, because other instructions sum in another order

  int64_t length(int64_t r) const { return starts[r + 1] - starts[r]; }

  // The place in the pool of a token's key (kv = 0) or value (kv = 1) for one head in this call's layer.
  int64_t place(int64_t r, int64_t head, int64_t position, int64_t kv) const {
    const int64_t page = tables[r * table_len + position / page_size];
    return ((((page * kv_heads + head) * layers + layer) * 2 + kv) * page_size + position % page_size) * dim;
  }

  // ROWS rows of a page, in place or widened. They are valid until the next call in this thread.
  const T* rows(int64_t r, int64_t head, int64_t position, int64_t kv) const {
    const int64_t first = place(r, head, position, kv);
    if (bytes == nullptr) return pool + first;
    thread_local std::vector<T> widened;
    widened.resize(ROWS * dim);
    widen_all(bytes + first, ROWS * dim, widened.data());
    return widened.data();
  }

  void prefetch_rows(int64_t r, int64_t head, int64_t position, int64_t kv) const {
    const int64_t first = place(r, head, position, kv);
    if (bytes == nullptr) prefetch(pool + first, ROWS * dim);
    else prefetch(bytes + first, ROWS * dim);
  }

  void store(const T* row, int64_t r, int64_t head, int64_t position, int64_t kv) const {
    const int64_t first = place(r, head, position, kv);
    if (bytes == nullptr) std::memcpy(pool + first, row, dim * sizeof(T));
    else
      for (int64_t d = 0; d < dim; ++d) bytes[first + d] = to_eight_bits(widen(row[d]));
  }

  int64_t first_visible(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }

  const float* sinks_of(int64_t head) const { return sinks ? sinks + head * group : nullptr; }

  float score(float product) const { return softcap > 0 ? softcap * std::tanh(product / softcap) : product; }
};

template <typename T>
void store_new(const Call<T>& c, int64_t r, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t token = c.starts[r] + i, position = c.contexts[r] - c.length(r) + i;
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      c.store(c.key + head * c.key_head + token * c.key_token, r, head, position, 0);
      c.store(c.value + head * c.value_head + token * c.value_token, r, head, position, 1);
    }
  }
}

// The contribution of some keys to query rows: [rows] maxima, [rows] sums, then [rows, width] weighted values.
struct Partial {
  float *max, *sum, *rows;
  int64_t width;

  void clear(int64_t count) const {
    std::fill(max, max + count, LOWEST);
    std::fill(sum, sum + count, 0.0f);
    std::fill(rows, rows + count * width, 0.0f);
  }

  // Sets the state before the first key. Row i is of query head i % group, and includes that head's sink, which has no value.
  void clear(int64_t count, const float* sinks, int64_t group) const {
    clear(count);
    if (sinks == nullptr) return;
    for (int64_t i = 0; i < count; ++i) max[i] = sinks[i % group], sum[i] = 1.0f;
  }
};

// Converts one query row's scores of a block of keys to weights; the row sees keys [from, to). Updates `max` and `sum`.
// Returns the factor by which the sums of values so far must be multiplied.
template <typename T>
__attribute__((noinline)) float soften(const Call<T>& c, float* scores, int64_t from, int64_t to, typename Products<T>::Left* weights, float& max, float& sum) {
  for (int64_t j = 0; j < KEY_BLOCK; ++j) scores[j] *= c.scaling;
  if (c.softcap > 0)
    for (int64_t j = from; j < to; ++j) scores[j] = c.score(scores[j]);
  if (from > 0 || to < KEY_BLOCK)
    for (int64_t j = 0; j < KEY_BLOCK; ++j) scores[j] = j >= from && j < to ? scores[j] : -INFINITY;
  float most = max, total = 0;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < KEY_BLOCK; ++j) most = scores[j] > most ? scores[j] : most;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < KEY_BLOCK; ++j) total += scores[j] = exp_of(scores[j] - most);
  narrow_all(scores, KEY_BLOCK, weights);
  const float shrink = exp_of(max - most);
  sum = sum * shrink + total;
  max = most;
  return shrink;
}

// Merges row i of the next span's contribution into that of the spans before it.
__attribute__((noinline)) void merge(const Partial& span, int64_t i, const Partial& before) {
  const float max = std::max(before.max[i], span.max[i]);
  const float old_share = exp_of(before.max[i] - max), share = exp_of(span.max[i] - max);
  before.max[i] = max;
  before.sum[i] = before.sum[i] * old_share + span.sum[i] * share;
  float *total = before.rows + i * before.width, *rows = span.rows + i * span.width;
  for (int64_t d = 0; d < before.width; ++d) total[d] = total[d] * old_share + rows[d] * share;
}

template <typename T>
__attribute__((noinline)) void finish(const Partial& all, int64_t i, int64_t dim, T* out) {
  for (int64_t d = 0; d < dim; ++d) narrow(all.rows[i * all.width + d] / all.sum[i], out[d]);
}

// Copies the queries of tokens first..last-1 of a request for one key head, [tokens * group, wide].
template <typename T>
void put_queries(const Call<T>& c, int64_t r, int64_t head, int64_t first, int64_t last, int64_t wide, typename Products<T>::Left* queries) {
  for (int64_t i = 0; i < (last - first) * c.group; ++i) {
    const int64_t token = c.starts[r] + first + i / c.group;
    const T* q = c.query + (head * c.group + i % c.group) * c.query_head + token * c.query_token;
    for (int64_t d = 0; d < c.dim; ++d) narrow(widen(q[d]), queries[i * wide + d]);
  }
}

#ifdef HAS_TILES
// The same as decode_span, by tiles. Keys are not packed.
void decode_span_by_tiles(const Call<Bf16>& c, int64_t r, int64_t head, int64_t first, int64_t last, const Partial& part) {
  thread_local std::vector<float> scores;
  thread_local std::vector<Bf16> lefts;
  thread_local std::vector<uint32_t> rights;
  const int64_t columns = (c.group + Tiles::HALF - 1) / Tiles::HALF * Tiles::HALF;
  scores.resize(c.group * KEY_BLOCK);
  lefts.resize(c.group * (c.dim + KEY_BLOCK));
  rights.resize((columns + KEY_BLOCK) * c.dim / 2);
  Bf16 *queries = lefts.data(), *weights = queries + c.group * c.dim;
  uint32_t *pairs = rights.data(), *values = pairs + columns * c.dim / 2;
  Tiles tiles;
  put_queries(c, r, head, 0, 1, c.dim, queries);
  pair_queries(queries, c.group, c.dim, pairs);
  part.clear(c.group);
  for (int64_t block = first / KEY_BLOCK * KEY_BLOCK; block < last; block += KEY_BLOCK) {
    const int64_t count = std::min(KEY_BLOCK, last - block), from = std::max<int64_t>(0, first - block);
    tiles.set_rows(std::min(c.group, Tiles::HALF));
    for (int64_t j = 0; j < count; j += ROWS) {  // scores of keys after `count` are not read
      c.prefetch_rows(r, head, block + j, 1);
      if (block + j + ROWS < last) c.prefetch_rows(r, head, block + j + ROWS, 0);
      score_keys(tiles, c.rows(r, head, block + j, 0), pairs, c.group, c.dim, scores.data() + j);
    }
    for (int64_t g = 0; g < c.group; ++g) {
      const float shrink = soften(c, scores.data() + g * KEY_BLOCK, from, count, weights + g * KEY_BLOCK, part.max[g], part.sum[g]);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < c.dim; ++d) part.rows[g * c.dim + d] *= shrink;
    }
    const int64_t depth = (count + 2 * Tiles::PAIRS - 1) / (2 * Tiles::PAIRS) * (2 * Tiles::PAIRS);
    for (int64_t j = 0; j < depth; j += ROWS)
      put_values(values, j, c.rows(r, head, block + std::min(j, (count - 1) / ROWS * ROWS), 1), from - j, count - j, c.dim, c.dim);
    multiply(&tiles, part.rows, c.dim, weights, KEY_BLOCK, values, c.dim, c.group, c.dim, depth / 2, true);
  }
}
#endif

// Computes the contribution of keys first..last-1, of one span, to a decode, for the query heads of one key head.
template <typename T>
void decode_span(const Call<T>& c, int64_t r, int64_t head, int64_t first, int64_t last, const Partial& part) {
#ifdef HAS_TILES
  if constexpr (std::is_same_v<T, Bf16>)
    if (c.by_tiles) return decode_span_by_tiles(c, r, head, first, last, part);
#endif
  typedef Products<T> P;
  thread_local std::vector<float> numbers;
  thread_local std::vector<typename P::Left> lefts;
  thread_local std::vector<typename P::Right> rights;
  numbers.resize(c.group * KEY_BLOCK);
  lefts.resize(c.group * (c.dim + KEY_BLOCK));
  rights.resize(KEY_BLOCK * c.dim);
  float* scores = numbers.data();
  typename P::Left *queries = lefts.data(), *weights = queries + c.group * c.dim;
  typename P::Right* keys = rights.data();
  put_queries(c, r, head, 0, 1, c.dim, queries);
  part.clear(c.group);
  for (int64_t block = first / KEY_BLOCK * KEY_BLOCK; block < last; block += KEY_BLOCK) {
    const int64_t count = std::min(KEY_BLOCK, last - block), from = std::max<int64_t>(0, first - block);
    for (int64_t j = 0; j < count; j += ROWS) {  // scores of keys after `count` are not read
      c.prefetch_rows(r, head, block + j, 1);
      if (KEYS_AHEAD && block + j + ROWS < last) c.prefetch_rows(r, head, block + j + ROWS, 0);
      put_keys(keys, j, c.rows(r, head, block + j, 0), c.dim);
    }
    multiply(scores, KEY_BLOCK, queries, c.dim, keys, KEY_BLOCK, c.group, KEY_BLOCK, c.dim / P::TOGETHER, false);
    for (int64_t g = 0; g < c.group; ++g) {
      const float shrink = soften(c, scores + g * KEY_BLOCK, from, count, weights + g * KEY_BLOCK, part.max[g], part.sum[g]);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < c.dim; ++d) part.rows[g * c.dim + d] *= shrink;
    }
    for (int64_t j = 0; j < count; j += ROWS) {
      const T* values = c.rows(r, head, block + j, 1);
      by_rows(c.group, [&](int64_t g, auto rows) {
        add_rows<rows()>(weights + g * KEY_BLOCK + j, values, std::max<int64_t>(0, from - j), std::min(ROWS, count - j), c.dim,
                         part.rows + g * c.dim, part.width);
      });
    }
  }
}

// Merges the spans of one decode and key head, in order, into the output.
template <typename T>
void merge_spans(const Call<T>& c, int64_t r, int64_t head, const Partial* spans, int64_t count, const Partial& all) {
  all.clear(c.group, c.sinks_of(head), c.group);
  for (int64_t s = 0; s < count; ++s)
    for (int64_t g = 0; g < c.group; ++g) merge(spans[s], g, all);
  for (int64_t g = 0; g < c.group; ++g) finish(all, g, c.dim, c.out + (c.starts[r] * c.heads + head * c.group + g) * c.dim);
}

// Computes queries first..last-1 of a prompt chunk with all keys that they see, for the query heads of one key head.
template <typename T>
void prompt_tile(const Call<T>& c, int64_t r, int64_t head, int64_t first, int64_t last) {
  typedef Products<T> P;
  const int64_t dim = c.dim, wide = (dim + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
  const int64_t rows = (last - first) * c.group, before = c.contexts[r] - c.length(r);  // position of the chunk's first token
  thread_local std::vector<float> numbers;
  thread_local std::vector<typename P::Left> lefts;
  thread_local std::vector<typename P::Right> rights;
  numbers.resize(rows * (2 * wide + KEY_BLOCK + 4));
  lefts.resize(rows * (wide + KEY_BLOCK));
  rights.assign(2 * KEY_BLOCK * wide, 0);
  float *scores = numbers.data(), *next = scores + rows * KEY_BLOCK;
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  const Partial span{take(rows), take(rows), take(rows * wide), wide}, all{take(rows), take(rows), take(rows * wide), wide};
  typename P::Left *queries = lefts.data(), *weights = queries + rows * wide;
  typename P::Right *keys = rights.data(), *values = keys + KEY_BLOCK * wide;
  Tiles some, *tiles = c.by_tiles ? &some : nullptr;
  put_queries(c, r, head, first, last, wide, queries);
  span.clear(rows);
  all.clear(rows, c.sinks_of(head), c.group);
  const int64_t end = before + last;  // after the last key that is seen
  for (int64_t block = c.first_visible(before + first) / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
    const int64_t count = std::min(KEY_BLOCK, end - block);
    for (int64_t j = 0; j < count; j += ROWS) {
      put_keys(keys, j, c.rows(r, head, block + j, 0), dim);
      put_values(values, j, c.rows(r, head, block + j, 1), 0, count - j, dim, wide);
    }
    const int64_t skipped = std::max<int64_t>(0, block - before - first) * c.group;  // rows that see none of these keys
    multiply(tiles, scores + skipped * KEY_BLOCK, KEY_BLOCK, queries + skipped * wide, wide, keys, KEY_BLOCK, rows - skipped, KEY_BLOCK,
             dim / P::TOGETHER, false);
    for (int64_t i = skipped; i < rows; ++i) {
      const int64_t position = before + first + i / c.group;
      const int64_t from = std::max<int64_t>(0, c.first_visible(position) - block), to = std::min(KEY_BLOCK, position - block + 1);
      const float shrink = soften(c, scores + i * KEY_BLOCK, from, to, weights + i * KEY_BLOCK, span.max[i], span.sum[i]);
      if (shrink != 1.0f)
        for (int64_t d = 0; d < wide; ++d) span.rows[i * wide + d] *= shrink;
    }
    multiply(tiles, span.rows + skipped * wide, wide, weights + skipped * KEY_BLOCK, KEY_BLOCK, values, wide, rows - skipped, wide,
             KEY_BLOCK / P::TOGETHER, true);
    if ((block + KEY_BLOCK) % SPAN == 0 || block + KEY_BLOCK >= end) {
      for (int64_t i = 0; i < rows; ++i) merge(span, i, all);
      span.clear(rows);
    }
  }
  for (int64_t i = 0; i < rows; ++i)
    finish(all, i, dim, c.out + ((c.starts[r] + first + i / c.group) * c.heads + head * c.group + i % c.group) * dim);
}

struct Task {
  int64_t request, head, first, last;  // for a decode a range of its context, for a prompt chunk a range of its tokens
  int64_t span;                        // index of its partial; -1: a prompt tile
};

template <typename F>
void on_all_threads(int64_t tasks, const F& work) {
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < tasks; i = next++) work(i);
  });
}

template <typename T>
void attend(const Call<T>& c) {
  std::vector<Task> tasks;
  std::vector<int64_t> first_span(c.requests * c.kv_heads, 0), spans_left(c.requests * c.kv_heads, 0);
  int64_t spans = 0;
  const int64_t most = TILE_ROWS / c.group, tile = most < 8 ? std::max<int64_t>(1, most) : most / 8 * 8;
  for (int64_t r = 0; r < c.requests; ++r) {  // prompt chunks first, each from its end, because these are the longest tasks
    const int64_t length = c.length(r);
    if (length < 2) continue;
    for (int64_t first = (length - 1) / tile * tile; first >= 0; first -= tile)
      for (int64_t head = 0; head < c.kv_heads; ++head) tasks.push_back({r, head, first, std::min(length, first + tile), -1});
  }
  for (int64_t r = 0; r < c.requests; ++r) {
    if (c.length(r) != 1) continue;
    const int64_t context = c.contexts[r];
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      first_span[r * c.kv_heads + head] = spans;
      for (int64_t first = c.first_visible(context - 1) / SPAN * SPAN; first < context; first += SPAN) {
        const int64_t from = std::max(first, c.first_visible(context - 1));
        tasks.push_back({r, head, from, std::min(context, first + SPAN), spans++});
      }
      spans_left[r * c.kv_heads + head] = spans - first_span[r * c.kv_heads + head];
    }
  }
  on_all_threads((c.tokens + 63) / 64, [&](int64_t part) {  // 64 tokens each, perhaps of several requests
    for (int64_t r = 0; r < c.requests; ++r) {
      const int64_t first = std::max<int64_t>(c.starts[r], part * 64), last = std::min<int64_t>(c.starts[r + 1], part * 64 + 64);
      if (first < last) store_new(c, r, first - c.starts[r], last - c.starts[r]);
    }
  });
  const int64_t pairs = c.requests * c.kv_heads;
  std::unique_ptr<float[]> memory(new float[(spans + pairs) * c.group * (c.dim + 2)]);
  std::vector<Partial> partials(spans + pairs);  // those of spans, then those of whole decodes
  for (int64_t s = 0; s < spans + pairs; ++s) {
    float* mine = memory.get() + s * c.group * (c.dim + 2);
    partials[s] = {mine, mine + c.group, mine + 2 * c.group, c.dim};
  }
  std::vector<std::atomic<int64_t>> left(c.requests * c.kv_heads);
  for (size_t i = 0; i < left.size(); ++i) left[i] = spans_left[i];
  on_all_threads(tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    if (task.span < 0) return prompt_tile(c, task.request, task.head, task.first, task.last);
    const Partial part = partials[task.span];
    decode_span(c, task.request, task.head, task.first, task.last, part);
    const int64_t pair = task.request * c.kv_heads + task.head;
    if (left[pair].fetch_sub(1) == 1)
      merge_spans(c, task.request, task.head, &partials[first_span[pair]], spans_left[pair], partials[spans + pair]);
  });
  const int64_t real = c.starts[c.requests];  // further tokens are padding
  std::memset(static_cast<void*>(c.out + real * c.heads * c.dim), 0, (c.tokens - real) * c.heads * c.dim * sizeof(T));
}

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("kvmesh::attend_pages: ") + what);
}

// With a wrong plan, the kernel would write outside the pool, and the cause would be hard to find.
template <typename T>
void check_plan(const Call<T>& c, int64_t pages) {
  require(c.starts[0] == 0, "the first request of the plan begins with token 0");
  const int64_t slots = c.table_len * c.page_size;
  for (int64_t r = 0; r < c.requests; ++r) {
    require(c.length(r) >= 0, "the plan's requests overlap");
    require(c.contexts[r] >= c.length(r), "a context of the plan is shorter than its chunk");
    require(c.contexts[r] <= slots, "a context of the plan is longer than its block table");
  }
  require(c.starts[c.requests] <= c.tokens, "the plan has more tokens than the query");
  int32_t lowest = 0, highest = 0;
  for (int64_t i = 0; i < c.requests * c.table_len; ++i) {
    lowest = std::min(lowest, c.tables[i]);
    highest = std::max(highest, c.tables[i]);
  }
  require(lowest >= 0 && highest < pages, "a page of the plan is not in the pool");
}

template <typename T>
Tensor attend_with(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& pool, const Tensor& plan, int64_t layer, double scaling, int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  Call<T> c{};
  c.sinks = sinks ? static_cast<const float*>(sinks->data_ptr()) : nullptr;
  c.query = static_cast<const T*>(query.data_ptr());
  c.key = static_cast<const T*>(key.data_ptr());
  c.value = static_cast<const T*>(value.data_ptr());
  if (pool.scalar_type() == ScalarType::Float8_e4m3fn) c.bytes = static_cast<uint8_t*>(pool.data_ptr());
  else c.pool = static_cast<T*>(pool.data_ptr());
  c.query_head = query.stride(1), c.query_token = query.stride(2);
  c.key_head = key.stride(1), c.key_token = key.stride(2);
  c.value_head = value.stride(1), c.value_token = value.stride(2);
  c.heads = query.size(1), c.tokens = query.size(2), c.dim = query.size(3);
  c.kv_heads = key.size(1), c.group = c.heads / c.kv_heads;
  c.layers = pool.size(2), c.page_size = pool.size(4), c.layer = layer;
  const int32_t* numbers = static_cast<const int32_t*>(plan.data_ptr());
  c.requests = numbers[0], c.table_len = numbers[1];
  require(c.requests >= 0 && c.table_len >= 0, "the plan has a negative size");
  c.starts = numbers + 2, c.contexts = c.starts + c.requests + 1, c.tables = c.contexts + c.requests;
  require(plan.size(0) >= 3 + c.requests * (2 + c.table_len), "the plan is shorter than it says");
  check_plan(c, pool.size(0));
  c.by_tiles = std::is_same_v<T, Bf16> && c.dim % (2 * Tiles::PAIRS) == 0 && may_use_tiles();
  c.scaling = static_cast<float>(scaling), c.softcap = static_cast<float>(softcap), c.window = window;
  const int64_t shape[] = {1, c.tokens, c.heads, c.dim};
  Tensor out = torch::stable::new_empty(query, shape);
  c.out = static_cast<T*>(out.data_ptr());
  attend(c);
  return out;
}

Tensor attend_pages(Tensor query, Tensor key, Tensor value, Tensor pool, Tensor plan, int64_t layer, double scaling, int64_t window, double softcap, std::optional<Tensor> sinks) {
  adapt_threads();
  const ScalarType dtype = query.scalar_type();
  require(query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && pool.dim() == 6 && plan.dim() == 1, "a tensor has the wrong number of dimensions");
  require(key.scalar_type() == dtype && value.scalar_type() == dtype, "query, key and value differ in dtype");
  require(pool.scalar_type() == dtype || pool.scalar_type() == ScalarType::Float8_e4m3fn, "the pool has neither the query's dtype nor 8-bit floats");
  require(plan.scalar_type() == ScalarType::Int, "the plan must be int32");
  require(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "heads must be contiguous");
  require(query.size(0) == 1 && key.size(0) == 1, "there must be one sequence of tokens");
  for (int d = 0; d < 4; ++d) require(key.size(d) == value.size(d), "key and value differ in shape");
  require(key.size(2) == query.size(2) && key.size(3) == query.size(3), "query and key differ in shape");
  require(query.size(3) % 16 == 0, "the head size must be a multiple of 16");
  require(pool.size(3) == 2 && pool.size(4) % ROWS == 0, "pages must have keys and values of a multiple of 16 tokens");
  require(layer >= 0 && layer < pool.size(2), "the pool has no such layer");
  require(window >= 0, "a window cannot be negative");
  require(plan.size(0) >= 3, "the plan is shorter than it says");
  require(pool.is_contiguous() && plan.is_contiguous(), "pool and plan must be contiguous");
  require(pool.size(1) == key.size(1) && pool.size(5) == query.size(3) && query.size(1) % key.size(1) == 0, "heads do not match the pool");
  if (sinks) {
    require(sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous(), "sinks must be contiguous float32");
    require(sinks->dim() == 1 && sinks->size(0) == query.size(1), "there must be one sink for each query head");
  }
  if (dtype == ScalarType::BFloat16) return attend_with<Bf16>(query, key, value, pool, plan, layer, scaling, window, softcap, sinks);
  if (dtype == ScalarType::Half) return attend_with<_Float16>(query, key, value, pool, plan, layer, scaling, window, softcap, sinks);
  require(dtype == ScalarType::Float, "the query must be float32, bfloat16 or float16");
  return attend_with<float>(query, key, value, pool, plan, layer, scaling, window, softcap, sinks);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(kvmesh, library) {
  library.def(
      "attend_pages(Tensor query, Tensor key, Tensor value, Tensor pool, Tensor plan, int layer, float scaling, int window, "
      "float softcap, Tensor? sinks=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kvmesh, CPU, library) {
  library.impl("attend_pages", TORCH_BOX(&attend_pages));
}
