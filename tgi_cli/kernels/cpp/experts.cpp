// Tokens' rows are sorted by expert, so that a weight is read once for all rows that need it; the
// products of all experts are one stage each, whose tickets threads take as they come to them. A
// layer with 64 experts of 5 MB has about 30 of them at work for eight tokens: in calls of their own,
// each would end with threads that wait.
#include "experts.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "gemm.h"
#include "states.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr int64_t MEMORY = 64 << 20;  // bytes for rows; of more tokens, some are computed at a time
constexpr int64_t ROWS_AT_ONCE = 8;   // tokens or rows per ticket of what is done row by row

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory that a thread keeps.
uint8_t* scratch(int64_t bytes) {
  static thread_local std::unique_ptr<void, Free> memory;
  static thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset();
    size = (bytes + 63) / 64 * 64;
    memory.reset(std::aligned_alloc(64, size_t(size)));
  }
  return static_cast<uint8_t*>(memory.get());
}

// One product of each expert that has rows, over neighbouring rows.
class Products {
 public:
  // `quantized` has memory for each row, `stride` bytes apart.
  void add(const Linear& linear, uint8_t* quantized, int64_t stride) {
    linears_.push_back(linear);
    rows_.push_back({quantized + total_ * stride, quantized_stride(*linear.weight)});
    total_ += linear.rows;
  }

  void run(int threads) {
    // A product is cut into fewer pieces the more of them there are: memory is read best in long runs.
    for (Linear& linear : linears_) {
      linear.beside = int32_t(linears_.size() - 1);
      quantize_ends_.push_back((quantize_ends_.empty() ? 0 : quantize_ends_.back()) + quantize_tickets(linear));
      ends_.push_back((ends_.empty() ? 0 : ends_.back()) + linear_tickets(linear));
    }
    if (linears_.empty()) return;
    share_out(threads, quantize_ends_.back(), [&](int64_t ticket, int) {
      const size_t i = find(quantize_ends_, ticket);
      quantize_run(linears_[i], rows_[i], ticket - (i ? quantize_ends_[i - 1] : 0));
    });
    share_out(threads, ends_.back(), [&](int64_t ticket, int) {
      const size_t i = find(ends_, ticket);
      linear_run(linears_[i], rows_[i], ticket - (i ? ends_[i - 1] : 0));
    });
  }

 private:
  static size_t find(const std::vector<int64_t>& ends, int64_t ticket) {
    return size_t(std::upper_bound(ends.begin(), ends.end(), ticket) - ends.begin());
  }

  std::vector<Linear> linears_;
  std::vector<QuantizedRows> rows_;
  std::vector<int64_t> quantize_ends_, ends_;
  int64_t total_ = 0;
};

// x * sigmoid(1.702 x) * (up + 1) of a row's gates and ups, rounded where torch's operations round;
// into the place of the gates.
void clamped_swiglu(bf16* row, int64_t width) {
  in_vectors(0, width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
    const f32x16 gate = minimum(splat(7.0f), load_part(row + i, left));
    const f32x16 up = minimum(splat(7.0f), maximum(splat(-7.0f), load_part(row + width + i, left)));
    const f32x16 open = through_bf16(sigmoid(through_bf16(gate * 1.702f)));
    store_part(row + i, through_bf16(open * gate) * through_bf16(up + 1.0f), left);
  });
}

// What a stage of tokens or rows does one by one.
template <class Each>
void row_by_row(int threads, int64_t total, const Each& each) {
  share_out(threads, (total + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, [&](int64_t ticket, int) {
    const int64_t end = std::min(total, (ticket + 1) * ROWS_AT_ONCE);
    for (int64_t row = ticket * ROWS_AT_ONCE; row < end; ++row) each(row);
  });
}

// Rows of all experts in turn, of one width.
struct Buffer {
  bf16* first = nullptr;
  int64_t width = 0;

  bf16* row(int64_t index) const { return first + index * width; }
};

// The experts of some tokens.
class Mixture {
 public:
  // Bytes for each token.
  static int64_t bytes(const Experts& layer) {
    const int64_t shared = layer.shared ? 2 * (layer.shared->down->in + layer.shared->down->out) : 0;
    return layer.top_k * 2 * (longest(layer) + layer.blocks[0].up->out) + shared +
           (layer.top_k + 1) * (stride(layer) + 64);
  }

  // Tokens [first, first + tokens) of the layer, whose experts are given.
  Mixture(const Experts& layer, int64_t first, int64_t tokens, const int64_t* chosen, const bf16* factors)
      : layer_(layer), first_(first), tokens_(tokens), pairs_(tokens * layer.top_k), factors_(factors),
        position_(size_t(pairs_)), pair_at_(size_t(pairs_)) {
    const Block& any = layer.blocks[0];
    uint8_t* memory = scratch(tokens * bytes(layer) + 5 * 64);
    auto take = [&](int64_t size) {
      uint8_t* const mine = memory;
      memory += (size + 63) / 64 * 64;
      return mine;
    };
    const int64_t quantized_bytes = stride(layer);
    uint8_t* const quantized = take((pairs_ + tokens) * quantized_bytes);
    bf16* const rows = reinterpret_cast<bf16*>(take(pairs_ * longest(layer) * 2));
    inputs_ = {rows, any.up->in};
    outputs_ = {rows, any.down->out};  // inputs are no longer needed then
    const int64_t wide = layer.epilogue == STORE ? any.up->out : any.down->in;
    inner_ = {reinterpret_cast<bf16*>(take(pairs_ * wide * 2)), wide};
    sort(chosen);
    int64_t row = 0;
    for (int64_t e = 0; e < layer.experts; ++e) {
      const int64_t count = ends_[size_t(e)] - row;
      if (!count) continue;
      Linear up{};
      up.rows = count;
      up.x = inputs_.row(row);
      up.x_stride = inputs_.width;
      up.epilogue = layer.epilogue;
      up.activation = layer.activation;
      add(layer.blocks[e], up, inner_.row(row), wide, outputs_.row(row), quantized, quantized_bytes);
      row += count;
    }
    if (layer.shared) {
      const Matrix& down = *layer.shared->down;
      shared_ = {reinterpret_cast<bf16*>(take(tokens * down.out * 2)), down.out};
      bf16* const inner = reinterpret_cast<bf16*>(take(tokens * down.in * 2));
      Linear up{};
      up.rows = tokens;
      up.x = layer.x + first * layer.x_stride;
      up.x_stride = layer.x_stride;
      up.epilogue = GATED;
      up.activation = layer.shared_activation;
      add(*layer.shared, up, inner, down.in, shared_.first, quantized, quantized_bytes);
    }
  }

  void run(int threads) {
    row_by_row(threads, pairs_, [&](int64_t row) { gather(row); });
    up_.run(threads);
    if (layer_.epilogue == STORE)
      row_by_row(threads, pairs_, [&](int64_t row) { clamped_swiglu(inner_.row(row), layer_.blocks[0].down->in); });
    down_.run(threads);
    row_by_row(threads, tokens_, [&](int64_t token) { combine(token); });
  }

 private:
  static int64_t longest(const Experts& layer) {
    return std::max(layer.blocks[0].up->in, layer.blocks[0].down->out);
  }

  // Bytes of the longest quantized row; 0 if none is quantized.
  static int64_t stride(const Experts& layer) {
    int64_t most = 0;
    auto look = [&](const Block& block) {
      most = std::max({most, quantized_stride(*block.up), quantized_stride(*block.down)});
    };
    std::for_each(layer.blocks, layer.blocks + layer.experts, look);
    if (layer.shared) look(*layer.shared);
    return most;
  }

  // Where each pair of a token and an expert has its row: by expert, then by token.
  void sort(const int64_t* chosen) {
    ends_.assign(size_t(layer_.experts), 0);
    for (int64_t pair = 0; pair < pairs_; ++pair) ++ends_[size_t(chosen[pair])];
    int64_t row = 0;
    for (int64_t& end : ends_) row += std::exchange(end, row);
    for (int64_t pair = 0; pair < pairs_; ++pair) {
      position_[size_t(pair)] = ends_[size_t(chosen[pair])]++;
      pair_at_[size_t(position_[size_t(pair)])] = pair;
    }
  }

  // The two products of a block, of which `up` lacks its weight and where it goes.
  void add(const Block& block, Linear up, bf16* inner, int64_t wide, bf16* y, uint8_t* quantized, int64_t stride) {
    up.weight = block.up;
    up.bias = block.up_bias;
    up.y = inner;
    up.y_stride = wide;
    up.scale = 1.0f;
    Linear down = up;
    down.x = inner;
    down.x_stride = wide;
    down.weight = block.down;
    down.bias = block.down_bias;
    down.y = y;
    down.y_stride = block.down->out;
    down.epilogue = STORE;
    up_.add(up, quantized, stride);
    down_.add(down, quantized, stride);
  }

  void gather(int64_t row) const {
    const int64_t pair = pair_at_[size_t(row)];
    const bf16* from = layer_.x + (first_ + pair / layer_.top_k) * layer_.x_stride;
    bf16* const to = inputs_.row(row);
    if (!layer_.scale_inputs) {
      std::copy_n(from, inputs_.width, to);
      return;
    }
    const float by = to_float(factors_[pair]);
    in_vectors(0, inputs_.width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
      store_part(to + i, load_part(from + i, left) * by, left);
    });
  }

  // A token's experts are added up in their own order, whatever else is computed, with the roundings
  // of torch's operations.
  void combine(int64_t token) const {
    static thread_local std::vector<int64_t> own;
    own.assign(position_.begin() + token * layer_.top_k, position_.begin() + (token + 1) * layer_.top_k);
    std::sort(own.begin(), own.end());
    bf16* const y = layer_.y + (first_ + token) * layer_.y_stride;
    in_vectors(0, outputs_.width, [&](int64_t i, int64_t left) __attribute__((always_inline)) {
      f32x16 sum = splat(0.0f);
      for (const int64_t row : own) {
        f32x16 value = load_part(outputs_.row(row) + i, left);
        if (!layer_.scale_inputs) value = through_bf16(value * to_float(factors_[pair_at_[size_t(row)]]));
        sum = through_bf16(sum + value);
      }
      if (layer_.shared) sum = sum + load_part(shared_.row(token) + i, left);
      store_part(y + i, sum, left);
    });
  }

  const Experts& layer_;
  int64_t first_, tokens_, pairs_;
  const bf16* factors_;
  std::vector<int64_t> position_;  // of each pair of a token and an expert: its row
  std::vector<int64_t> pair_at_;   // of each row: its pair
  std::vector<int64_t> ends_;      // of each expert's rows
  Buffer inputs_, inner_, outputs_, shared_;
  Products up_, down_;
};

// Logits of tokens [first, first + tokens), and what follows from them.
void route(const Experts& layer, int64_t first, int64_t tokens, int threads, std::vector<int64_t>& chosen,
           std::vector<bf16>& factors) {
  static thread_local std::vector<float> made;
  const Routing& routing = *layer.routing;
  const float* logits = layer.logits + first * layer.experts;
  const bf16* const x = layer.x + first * layer.x_stride;
  if (routing.matrix || routing.weight) {
    made.resize(size_t(tokens * layer.experts));
    logits = made.data();
  }
  if (routing.weight)
    router_logits({x, layer.x_stride, tokens, routing.weight, layer.experts, layer.blocks[0].up->in, made.data()},
                  threads);
  if (routing.matrix) {
    Linear linear{};
    linear.x = x;
    linear.x_stride = layer.x_stride;
    linear.rows = tokens;
    linear.weight = routing.matrix;
    linear.bias = routing.bias;
    linear.y = made.data();
    linear.y_stride = layer.experts;
    linear.epilogue = FLOAT;
    Products product;
    product.add(linear, nullptr, 0);
    product.run(threads);
  }
  chosen.resize(size_t(tokens * layer.top_k));
  factors.resize(chosen.size());
  row_by_row(threads, tokens, [&, logits](int64_t token) {
    choose(routing, logits + token * layer.experts, layer.experts, layer.top_k, chosen.data() + token * layer.top_k,
           factors.data() + token * layer.top_k);
  });
}

}  // namespace

void experts_run(const Experts& layer, int threads) {
  const int64_t most = std::max<int64_t>(MEMORY / Mixture::bytes(layer), 1);
  static thread_local std::vector<int64_t> chosen;
  static thread_local std::vector<bf16> factors;
  for (int64_t first = 0; first < layer.tokens; first += most) {
    const int64_t tokens = std::min(most, layer.tokens - first), pair = first * layer.top_k;
    if (layer.routing) route(layer, first, tokens, threads, chosen, factors);
    Mixture(layer, first, tokens, layer.routing ? chosen.data() : layer.chosen + pair,
            layer.routing ? factors.data() : layer.factors + pair)
        .run(threads);
  }
}

}  // namespace tgi

TGI_EXPORT void tgi_experts(const tgi::Experts* layer, int threads) { tgi::experts_run(*layer, threads); }
