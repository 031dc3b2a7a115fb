// Packed weights and products with them: y = x W^T.
#pragma once

#include "pool.h"
#include "simd.h"

namespace tgi {

enum Format : int32_t { BF16 = 0, INT8 = 1, INT4 = 2, FP8 = 3, INT5 = 4, INT6 = 5 };

constexpr int64_t PANEL = 32;  // outputs

// Whether there is an instruction for dot products of bytes.
#if defined(__AVX512VNNI__)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

// Whether codes of integers can be multiplied as bytes: with that instruction, or with AVX2's for pairs.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define TGI_BYTE_PRODUCTS 1
#else
#define TGI_BYTE_PRODUCTS 0
#endif
constexpr bool BYTE_PRODUCTS = TGI_BYTE_PRODUCTS;

// Most inputs that share a scale of x if its numbers have two bytes and the weight has a scale per output.
// A block takes about as long as ten more inputs would. Up to 1024 inputs, its sum fits into 32 bits.
constexpr int64_t MAX_BLOCK = 768;

// A weight [out, in] in panels of 32 outputs. Filled by Python (kernels/linear.py); packing.cpp
// has the order of a panel's numbers.
struct Matrix {
  int32_t format;
  int32_t paired;  // panels hold 16 gate and 16 up outputs: gate i beside up i
  int64_t out;
  int64_t in;
  int64_t group;         // inputs that share a scale; 0: one scale per output, or none (BF16)
  const void* data;      // the panels
  const float* scales;   // per panel and group, 32 each; null for BF16
  const float* zeros;    // like scales: subtracted from a number before it is scaled; or null
  const bf16* table;     // INT4: what codes stand for, all 16 twice; null: themselves less 8
  int32_t input_bits;    // 8: x may be rounded to 8 bits where bytes are multiplied; else 16
  // Scales of groups that are not float32: numbers are scale * code - minimum. They are float16, or in two
  // levels: a small integer times the float32 of a supergroup, of which there is one for 2^super_shift
  // groups; `scales` has those, and `zeros` the minima's.
  int32_t super_shift;
  const void* scale_codes;    // per panel and group, 32 each: float16, or int8 if there are supergroups; or null
  const void* minimum_codes;  // float16 or uint8 likewise; or null if there are no minima

  // Outputs are padded to whole panels, of gate and up each by itself where they are paired.
  int64_t panels() const {
    return paired ? (out / 2 + PANEL / 2 - 1) / (PANEL / 2) : (out + PANEL - 1) / PANEL;
  }
  // Inputs are padded to whole chunks: what one step of the kernels takes.
  int64_t chunk_inputs() const {
    return format == INT5 ? 16 : format == INT4 || format == INT6 ? 8 : format == INT8 ? 4 : 2;
  }
  int64_t chunk_bytes() const { return format == FP8 ? 64 : format == INT5 ? 320 : format == INT6 ? 192 : 128; }
  int64_t chunks() const { return (in + chunk_inputs() - 1) / chunk_inputs(); }
  int64_t panel_bytes() const { return chunks() * chunk_bytes(); }
  int64_t groups() const { return group ? (in + group - 1) / group : 1; }
  int64_t supergroups() const { return (groups() + (int64_t(1) << super_shift) - 1) >> super_shift; }
  // Whether numbers of a group are scaled less an offset, which is multiplied by the sum of x.
  bool has_offsets() const { return zeros || minimum_codes; }
  // The code of an integer 0.
  int middle() const { return format == INT8 ? 128 : format == INT6 ? 32 : format == INT5 ? 16 : 8; }
  // Of 4-bit codes the chunks of two panels alternate: a single row needs the sums of both to keep
  // the processor busy, and memory is read best in one stream.
  int64_t interleaved() const { return format == INT4 ? 2 : 1; }
  int64_t chunk_stride() const { return interleaved() * chunk_bytes(); }
  // Bytes of a number of x in a product of integers (quantized_rows.h); 0: codes become bfloat16.
  int64_t planes() const {
    if (!BYTE_PRODUCTS || format == BF16 || format == FP8 || table) return 0;
    return input_bits == 8 ? 1 : VNNI && format == INT8 ? 2 : 0;
  }
  // Inputs whose numbers of x share a scale then, a multiple of 16, as groups are.
  int64_t block() const {
    if (planes() == 2 && !group) {
      const int64_t blocks = (in + MAX_BLOCK - 1) / MAX_BLOCK;
      return ((in + blocks - 1) / blocks + 31) / 32 * 32;
    }
    int64_t inputs = planes() == 1 ? 64 : 128;
    while (group % inputs) inputs /= 2;
    return inputs;
  }
  const uint8_t* panel(int64_t index) const {
    return static_cast<const uint8_t*>(data) +
           index / interleaved() * interleaved() * panel_bytes() +
           index % interleaved() * chunk_bytes();
  }
  // The first of 16 neighbouring outputs, and how many there are: half a panel.
  int64_t first_output(int64_t panel, int half) const {
    return paired ? half * (out / 2) + panel * (PANEL / 2) : panel * PANEL + half * (PANEL / 2);
  }
  int64_t outputs(int64_t panel, int half) const {
    int64_t end = paired && half == 0 ? out / 2 : out;
    int64_t left = end - first_output(panel, half);
    return left < 0 ? 0 : left < PANEL / 2 ? left : PANEL / 2;
  }
};

enum Epilogue : int32_t {
  STORE = 0,     // y = bf16
  ADD = 1,       // y = bf16(y + bf16(product)): into the residual
  GATED = 2,     // paired weights: y = bf16(act(gate) * up), out / 2 wide
  ACTIVATE = 3,  // y = bf16(act(bf16(product)))
  FLOAT = 4,     // y = float32 of the product rounded to bfloat16
};

// By number, as in kernels/linear.py.
enum Activation : int32_t {
  SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, QUICK_GELU = 5, TANH = 6, LOGISTIC = 7
};

struct Linear {
  const bf16* x;
  int64_t x_stride;  // in elements
  int64_t rows;
  const Matrix* weight;
  const bf16* bias;  // [out] in the order of the unpaired outputs, or null
  void* y;
  int64_t y_stride;
  int32_t epilogue;
  int32_t activation;
  float scale;  // ADD: of what is added (1: none)
  int32_t beside;  // products beside it in the same stage, which make work for all threads; may be 0
};

}  // namespace tgi
