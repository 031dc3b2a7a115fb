// Tokens and their log-probabilities, reading a row from memory once.
//
// Rows are summed up in chunks of a fixed size, chunk after chunk: what comes out depends on the
// row alone, not on the batch around it or on the number of threads. Drawing follows
// sampling/choice.py and sampling/filters.py: probabilities become integers, whose sums are exact
// in every order, and filters are thresholds on them.
#include "sample.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr int64_t CHUNK = 8192;
constexpr int64_t GROUP = 64;  // weights whose sum and maximum are kept: a choice reads few groups
constexpr int64_t SORTED = 256;  // weights that are sorted rather than split further
constexpr float SCALE = 281474976710656.0f;  // 2^48, the weight of a certain token
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x8 __attribute__((vector_size(64)));

// Sixteen float32 numbers added to eight sums: of integers exact in every order.
struct Mass {
  f64x8 low{}, high{};

  TGI_INLINE void add(f32x16 x) {
    f32x8 half[2];
    std::memcpy(half, &x, 64);
    low += __builtin_convertvector(half[0], f64x8);
    high += __builtin_convertvector(half[1], f64x8);
  }

  TGI_INLINE double total() const {
    f64x8 both = low + high;
    double sum = 0.0;
    for (int lane = 0; lane < 8; ++lane) sum += both[lane];
    return sum;
  }
};

struct Part {
  float peak;  // the highest number; NaN if any is
  float sum;   // of e^(x - peak)
};

// e^x for x <= 0, to about 2 in 10^7 where it is not small beside 1; from -86 down some 10^-38,
// -inf included. As 2^n 2^f with |f| <= 1/2: adding 1.5 * 2^23 rounds to an integer, and leaves n
// in the lowest bits.
TGI_INLINE f32x16 falling(f32x16 x) {
  f32x16 t = maximum(x * 1.44269504088896341f, splat(-125.0f));
  f32x16 shifted = t + 12582912.0f;
  f32x16 f = t - (shifted - 12582912.0f);
  f32x16 p = splat(1.339086337e-03f);
  p = p * f + 9.676031918e-03f;
  p = p * f + 5.550357114e-02f;
  p = p * f + 2.402210749e-01f;
  p = p * f + 6.931471880e-01f;
  p = p * f + 1.000000075e+00f;
  return (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

// The last vector of a row, filled up with what changes neither maxima nor sums.
TGI_INLINE f32x16 load_tail(const float* from, int64_t count) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = i < count ? from[i] : LOWEST;
  return load(lanes);
}

template <class Each>
TGI_INLINE void for_vectors(const float* x, int64_t count, const Each& each) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) each(i, load(x + i));
  if (i < count) each(i, load_tail(x + i, count - i));
}

float peak_of(const float* x, int64_t count) {
  f32x16 high[4] = {splat(LOWEST), splat(LOWEST), splat(LOWEST), splat(LOWEST)};
  i32x16 odd[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int lane = 0; lane < 4; ++lane) {
      f32x16 value = load(x + i + 16 * lane);
      high[lane] = maximum(value, high[lane]);
      odd[lane] |= value != value;
    }
  for_vectors(x + i, count - i, [&](int64_t, f32x16 value) {
    high[0] = maximum(value, high[0]);
    odd[0] |= value != value;
  });
  i32x16 any = odd[0] | odd[1] | odd[2] | odd[3];
  for (int lane = 0; lane < 16; ++lane)
    if (any[lane]) return NOT_A_NUMBER;
  return maximum_of(maximum(maximum(high[0], high[1]), maximum(high[2], high[3])));
}

Part sum_up(const float* x, int64_t count) {
  Part part{peak_of(x, count), 0.0f};
  if (!(part.peak > LOWEST)) return part;  // nothing there, or NaN
  f32x16 sum[4] = {};
  int64_t i = 0;
  for (; i + 64 <= count; i += 64)
    for (int lane = 0; lane < 4; ++lane)
      sum[lane] += falling(load(x + i + 16 * lane) - part.peak);
  for_vectors(x + i, count - i,
              [&](int64_t, f32x16 value) { sum[0] += falling(value - part.peak); });
  part.sum = sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
  return part;
}

// NaN if any is.
TGI_INLINE float higher(float a, float b) { return a != a || a > b ? a : b; }

int64_t first_that_equals(const float* x, int64_t count, float wanted) {
  for (int64_t i = 0; i < count; ++i)
    if (x[i] == wanted) return i;
  return 0;
}

// What a thread needs to draw; grown once.
struct Scratch {
  std::vector<float> weights;  // [vocabulary, rounded up]
  std::vector<float> highest;  // by group
  std::vector<double> sums;    // by group
  std::vector<float> keys;     // candidates
};

thread_local Scratch scratch;

// A row's weights: integers proportional to e^((score - peak) / temperature).
class Weights {
 public:
  Weights(const float* scores, int64_t vocabulary, float peak, float temperature)
      : vocabulary_(vocabulary), groups_((vocabulary + GROUP - 1) / GROUP) {
    scratch.weights.resize(groups_ * GROUP);
    scratch.highest.resize(groups_);
    scratch.sums.resize(groups_);
    scratch.keys.resize(groups_ * GROUP);
    weights_ = scratch.weights.data();
    highest_ = scratch.highest.data();
    sums_ = scratch.sums.data();
    float colder = 1.0f / temperature;
    double total = 0.0;
    for (int64_t first = 0; first < vocabulary; first += CHUNK) {
      int64_t count = std::min(CHUNK, vocabulary - first);
      f32x16 sum{};
      for_vectors(scores + first, count, [&](int64_t i, f32x16 score) {
        f32x16 share = falling((score - peak) * colder);
        store(weights_ + first + i, share);
        sum += share;
      });
      total += sum_of(sum);
    }
    for (int64_t i = (vocabulary + 15) / 16 * 16; i < groups_ * GROUP; ++i) weights_[i] = 0.0f;
    float scale = SCALE / float(total);
    total_ = 0.0;
    for (int64_t group = 0; group < groups_; ++group) {
      f32x16 high{};
      Mass sum;
      for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i += 16) {
        f32x16 weight = whole(load(weights_ + i) * scale);
        store(weights_ + i, weight);
        high = maximum(high, weight);
        sum.add(weight);
      }
      highest_[group] = maximum_of(high);
      sums_[group] = sum.total();
      total_ += sums_[group];
    }
  }

  // The threshold of all filters.
  float filter(int64_t top_k, double top_p, float min_p) {
    float threshold = 0.0f;
    if (top_k > 0 && top_k < vocabulary_) {
      int64_t count = collect(group_bound(top_k), 2.0f * SCALE);
      std::nth_element(keys(), keys() + top_k - 1, keys() + count, std::greater<float>());
      threshold = keys()[top_k - 1];
    }
    if (top_p < 1.0) threshold = nucleus(top_p, threshold);
    if (min_p > 0.0f) {
      float high = *std::max_element(highest_, highest_ + groups_);
      threshold = std::max(threshold, std::ceil(high * min_p));
    }
    return threshold;
  }

  // The first token, in vocabulary order, at which the running sum exceeds its share.
  int64_t choose(float threshold, double uniform) {
    double total = total_;
    if (threshold > 0.0f) {
      total = 0.0;
      for (int64_t group = 0; group < groups_; ++group) {
        sums_[group] = highest_[group] >= threshold ? kept_sum(group, threshold) : 0.0;
        total += sums_[group];
      }
    }
    double target = std::floor(uniform * total);
    int64_t group = 0;
    while (group + 1 < groups_ && target >= sums_[group]) target -= sums_[group++];
    int64_t last = 0;
    for (int64_t i = group * GROUP; i < std::min((group + 1) * GROUP, vocabulary_); ++i) {
      if (weights_[i] < threshold || weights_[i] == 0.0f) continue;
      last = i;
      target -= weights_[i];
      if (target < 0.0) break;
    }
    return last;
  }

 private:
  float* keys() { return scratch.keys.data(); }

  static f32x16 whole(f32x16 x) {
    f32x16 low = minimum(x, splat(8388608.0f));  // from 2^23 on, all are
    f32x16 cut = __builtin_convertvector(__builtin_convertvector(low, i32x16), f32x16);
    return x < 8388608.0f ? cut : x;
  }

  // As many weights as groups, at least, reach what so many groups' highest do.
  float group_bound(int64_t count) {
    if (count > groups_) return 0.0f;
    std::copy(highest_, highest_ + groups_, keys());
    std::nth_element(keys(), keys() + count - 1, keys() + groups_, std::greater<float>());
    return keys()[count - 1];
  }

  bool any_within(int64_t group, float low, float high) const {
    i32x16 within{};
    for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i += 16) {
      f32x16 weight = load(weights_ + i);
      within |= (weight >= low) & (weight <= high);
    }
    int64_t words[8], any = 0;
    std::memcpy(words, &within, 64);
    for (int64_t word : words) any |= word;
    return any;
  }

  // The weights in [low, high], into scratch.keys.
  int64_t collect(float low, float high) {
    float* out = keys();
    for (int64_t group = 0; group < groups_; ++group) {
      if (highest_[group] < low || !any_within(group, low, high)) continue;
      int64_t end = std::min((group + 1) * GROUP, vocabulary_);
      for (int64_t i = group * GROUP; i < end; ++i) {
        *out = weights_[i];
        out += weights_[i] >= low && weights_[i] <= high;
      }
    }
    return out - keys();
  }

  // The highest weight that bounds a set which holds `share` of what reaches `floor`.
  float nucleus(double share, float floor) {
    double total = floor > 0.0f ? from(floor).mass : total_;
    double needed = std::max(1.0, std::ceil(total * share));
    // Weights of at most (total - needed) / V hold at most total - needed together: the others
    // reach what is needed without them, and of a peaked distribution they are few.
    float low = std::max(floor, float((total - needed) / double(vocabulary_) * (1.0 - 0x1p-22)));
    // Halving by bits, which are in the order of the numbers: what is from `low` on suffices,
    // what is above `high` does not.
    float high = *std::max_element(highest_, highest_ + groups_);
    int64_t candidates = vocabulary_, beyond = 0;
    while (candidates - beyond > SORTED && low < high) {
      float middle = halfway(low, high);
      Reached reached = from(middle);
      if (reached.mass >= needed) {
        low = middle;
        candidates = reached.count;
      } else {
        high = before(middle);
        beyond = reached.count;
      }
    }
    if (high <= low) return low;
    needed -= from(after(high)).mass;
    int64_t count = collect(low, high);
    std::sort(keys(), keys() + count, std::greater<float>());
    for (int64_t i = 0; i < count; ++i) {
      needed -= keys()[i];
      if (needed <= 0.0) return keys()[i];
    }
    return low;
  }

  struct Reached {
    double mass;
    int64_t count;
  };

  // What the weights from a bound on are together.
  Reached from(float bound) const {
    Mass mass;
    i32x16 count{};
    for (int64_t group = 0; group < groups_; ++group) {
      if (highest_[group] < bound) continue;
      for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i += 16) {
        f32x16 weight = load(weights_ + i);
        i32x16 reaches = weight >= bound;
        mass.add((f32x16)((i32x16)weight & reaches));
        count -= reaches;
      }
    }
    int64_t total = 0;
    for (int lane = 0; lane < 16; ++lane) total += count[lane];
    return {mass.total(), total};
  }

  // Of numbers that are not negative.
  static int32_t bits(float x) {
    int32_t word;
    std::memcpy(&word, &x, 4);
    return word;
  }
  static float of_bits(int32_t word) {
    float x;
    std::memcpy(&x, &word, 4);
    return x;
  }
  static float halfway(float low, float high) {  // above low
    return of_bits(bits(low) + (bits(high) - bits(low) + 1) / 2);
  }
  static float before(float x) { return of_bits(bits(x) - 1); }
  static float after(float x) { return of_bits(bits(x) + 1); }

  double kept_sum(int64_t group, float threshold) {
    Mass sum;
    for (int64_t i = group * GROUP; i < (group + 1) * GROUP; i += 16) {
      f32x16 weight = load(weights_ + i);
      sum.add((f32x16)((i32x16)weight & (weight >= threshold)));
    }
    return sum.total();
  }

  int64_t vocabulary_;
  int64_t groups_;
  double total_;
  float* weights_;
  float* highest_;
  double* sums_;
};

int64_t choose(const Sample& sample, int64_t row, const float* scores, float peak) {
  double uniform = sample.uniforms ? sample.uniforms[row] : 0.0;
  if (uniform == 0.0 || !(peak > LOWEST)) return first_that_equals(scores, sample.vocabulary, peak);
  if (peak > std::numeric_limits<float>::max()) return 0;
  Weights weights(scores, sample.vocabulary, peak, sample.temperature[row]);
  float threshold = weights.filter(sample.top_k ? sample.top_k[row] : 0,
                                   sample.top_p ? sample.top_p[row] : 1.0,
                                   sample.min_p ? sample.min_p[row] : 0.0f);
  return weights.choose(threshold, uniform);
}

void finish(const Sample& sample, int64_t row, const Part* parts, int64_t chunks) {
  const float* logits = sample.logits + row * sample.logits_stride;
  const float* scores = sample.scores + row * sample.scores_stride;
  float peak = LOWEST;
  int64_t first = 0;  // the chunk that has it
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    if (!(parts[chunk].peak <= peak) && peak == peak) first = chunk;
    peak = higher(peak, parts[chunk].peak);
  }
  double sum = 0.0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    if (parts[chunk].sum > 0.0f)
      sum += parts[chunk].sum * std::exp(double(parts[chunk].peak) - double(peak));
  bool finite = std::fabs(peak) <= std::numeric_limits<float>::max();
  float log_sum = finite ? float(std::log(sum)) : NOT_A_NUMBER;
  bool draws = sample.uniforms && sample.uniforms[row] != 0.0;
  int64_t token;
  if (scores == logits && !draws) {
    int64_t begin = first * CHUNK;
    token = begin + first_that_equals(logits + begin, std::min(CHUNK, sample.vocabulary - begin), peak);
  } else {
    token = choose(sample, row, scores,
                   scores == logits ? peak : peak_of(scores, sample.vocabulary));
  }
  sample.token_ids[row] = token;
  sample.logprobs[row] = (logits[token] - peak) - log_sum;
  sample.peaks[row] = peak;
  sample.log_sums[row] = log_sum;
}

}  // namespace
}  // namespace tgi

TGI_EXPORT void tgi_sample(int threads, const tgi::Sample* told) {
  using namespace tgi;
  const Sample& sample = *told;
  const int64_t chunks = (sample.vocabulary + CHUNK - 1) / CHUNK;
  static thread_local std::vector<Part> kept;
  kept.resize(sample.rows * chunks);
  Part* parts = kept.data();
  share_out(threads, sample.rows * chunks, [&](int64_t ticket, int) {
    int64_t row = ticket / chunks, begin = ticket % chunks * CHUNK;
    parts[ticket] = sum_up(sample.logits + row * sample.logits_stride + begin,
                           std::min(CHUNK, sample.vocabulary - begin));
  });
  share_out(threads, sample.rows,
            [&](int64_t row, int) { finish(sample, row, parts + row * chunks, chunks); });
}
