// Where the numbers are that the operations of a program read and write.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "program.h"

namespace tgi {

// Some numbers of each token; null: none.
struct Rows {
  bf16* first;
  int64_t stride;

  bf16* of(int64_t token) const { return first + token * stride; }

  // Where a kernel's fields for them are.
  template <class T>
  void put(T*& at, int64_t& between) const {
    at = first;
    between = stride;
  }
};

// The buffers of a program, those of its caller among them.
class Buffers {
 public:
  // Beside the buffers there are `extra` bytes for each token, a multiple of 64.
  Buffers(const int64_t* widths, size_t count, int64_t extra)
      : strides_(widths, widths + count), places_(count), extra_(extra) {
    for (size_t i = CALLERS; i < count; ++i) {
      // Rows that are a whole multiple of 2 KB apart fall on the same sets of the caches: products
      // of many rows would copy them first.
      if (strides_[i] % 1024 == 0) strides_[i] += 32;
      places_[i] = width_;
      width_ += (strides_[i] + 31) / 32 * 32;
    }
  }

  // Whether there is memory for so many tokens.
  bool reserve(int64_t tokens) {
    if (tokens <= capacity_) return true;
    size_t bytes = size_t(tokens * extra_) + size_t(tokens * width_) * sizeof(bf16);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    arena_.reset();
    capacity_ = 0;
    arena_.reset(std::aligned_alloc(ALIGNMENT, std::max(bytes, ALIGNMENT)));
    if (!arena_) return false;
    capacity_ = tokens;
    return true;
  }

  Rows rows(const View& view, const Run& run) const {
    if (view.buffer < 0) return {nullptr, 0};
    const size_t index = size_t(view.buffer);
    const int64_t place = (extra_ / int64_t(sizeof(bf16)) + places_[index]) * capacity_;
    bf16* const first = index < CALLERS ? run.callers[index] : static_cast<bf16*>(arena_.get()) + place;
    return {first + view.offset, strides_[index]};
  }

  // The extra bytes of all tokens.
  uint8_t* extra() const { return static_cast<uint8_t*>(arena_.get()); }

 private:
  static constexpr size_t ALIGNMENT = 64;

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };

  std::vector<int64_t> strides_;  // between tokens
  std::vector<int64_t> places_;  // in the arena, for one token
  int64_t width_ = 0;            // of all of them there
  int64_t extra_;                // bytes of a token, in front of the buffers
  std::unique_ptr<void, Free> arena_;
  int64_t capacity_ = 0;  // in tokens
};

}  // namespace tgi
