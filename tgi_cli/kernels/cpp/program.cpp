// Runs a program: its operations are stages, which threads go through together (pool.h). With one
// token a layer has eight, and from one to the next takes about 0.2 us.
#include "program.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "elementwise.h"
#include "gemm.h"
#include "paged.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

constexpr int64_t ALIGNMENT = 64;
constexpr int64_t ROWS_AT_ONCE = 8;  // tokens per ticket of what is done token by token

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Program;

Shape shape_of(const Op& op) {
  return {op.heads, op.kv_heads, op.head_dim, op.value_dim, op.window, op.chunk};
}

// A stage of a run: an operation, or a part of one.
struct Part {
  const Program* program;
  const Op* op;
  int64_t tickets;
  size_t plan;   // of attention
  bool merging;  // the second part of attention over long contexts
};

struct Program {
  Run run;  // the one that is on
  std::vector<Op> ops;
  std::vector<int64_t> widths;
  std::vector<AttentionPlan> plans;
  std::vector<size_t> planned_for;  // the first operation that each serves
  std::vector<int64_t> places;  // of the buffers in the arena, for one token
  int64_t width = 0;            // of all of them
  std::unique_ptr<void, Free> arena;
  int64_t capacity = 0;  // in tokens
  std::vector<Part> parts;
  std::vector<Stage> stages;
  std::vector<double> seconds;

  bf16* buffer(int32_t index, const Run& run) const {
    if (index == 0) return run.residual;
    if (index == 1) return run.output;
    return static_cast<bf16*>(arena.get()) + places[size_t(index)] * capacity;
  }

  // Where a view begins, and what is between tokens.
  std::pair<bf16*, int64_t> view(const View& of, const Run& run) const {
    if (of.buffer < 0) return {nullptr, 0};
    return {buffer(of.buffer, run) + of.offset, widths[size_t(of.buffer)]};
  }

  bool reserve(int64_t tokens) {
    if (tokens <= capacity) return true;
    size_t bytes = size_t(tokens * width) * sizeof(bf16);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    arena.reset();
    capacity = 0;
    arena.reset(std::aligned_alloc(ALIGNMENT, std::max<size_t>(bytes, ALIGNMENT)));
    if (!arena) return false;
    capacity = tokens;
    return true;
  }

  // The plan that an operation can share with one before it; the number of plans: with none.
  size_t plan_of(const Op& op) const {
    auto alike = [&](size_t index) { return shape_of(ops[index]) == shape_of(op); };
    auto found = std::find_if(planned_for.begin(), planned_for.end(), alike);
    return size_t(found - planned_for.begin());
  }
};

Linear linear_of(const Program& program, const Op& op, const Run& run) {
  Linear linear;
  linear.x = program.buffer(op.input, run) + op.input_offset;
  linear.x_stride = program.widths[size_t(op.input)];
  linear.rows = run.tokens;
  linear.weight = op.matrix;
  linear.bias = op.linear_bias;
  linear.y = program.buffer(op.output, run) + op.output_offset;
  linear.y_stride = program.widths[size_t(op.output)];
  linear.epilogue = op.epilogue;
  linear.activation = op.activation;
  linear.scale = op.scale;
  return linear;
}

Attention attention_of(const Program& program, const Op& op, const Run& run) {
  Attention attention;
  attention.query = program.buffer(op.input, run) + op.input_offset;
  attention.query_stride = program.widths[size_t(op.input)];
  attention.output = program.buffer(op.output, run) + op.output_offset;
  attention.output_stride = program.widths[size_t(op.output)];
  attention.heads = op.heads;
  attention.cache = run.caches[op.layer];
  attention.scale = op.attention_scale;
  attention.softcap = op.softcap;
  attention.sinks = op.sinks;
  attention.window = op.window;
  attention.chunk = op.chunk;
  attention.bias = op.attention_bias;
  attention.distances = op.distances;
  return attention;
}

void norm_rows(const Program& program, const Op& op, const Run& run, int64_t first, int64_t last) {
  int64_t in_width = program.widths[size_t(op.input)];
  int64_t out_width = program.widths[size_t(op.output)];
  for (int64_t token = first; token < last; ++token) {
    const bf16* x = program.buffer(op.input, run) + token * in_width + op.input_offset;
    if (op.residual >= 0) {
      bf16* sum = program.buffer(op.residual, run) + token * program.widths[size_t(op.residual)];
      add_row(sum, x, op.scale, op.width);
      x = sum;
    }
    bf16* y = program.buffer(op.output, run) + token * out_width + op.output_offset;
    if (op.norm == RMS_NORM) rms_norm_row(x, y, op.weight, op.eps, op.width);
    if (op.norm == LAYER_NORM) layer_norm_row(x, y, op.weight, op.bias, op.eps, op.width);
  }
}

void rotate_rows(const Program& program, const Op& op, const Run& run, int64_t first, int64_t last) {
  int64_t dims = op.head_dim, width = program.widths[size_t(op.input)];
  for (int64_t token = first; token < last; ++token) {
    bf16* heads = program.buffer(op.input, run) + token * width + op.input_offset;
    for (int64_t head = 0; head < op.heads + op.kv_heads; ++head) {
      bf16* values = heads + head * dims;
      if (op.weight) rms_norm_row(values, values, op.weight + head * dims, op.eps, dims);
      if (op.rope >= 0)
        rotate_head(values, run.cosines[op.rope] + token * op.rotated,
                    run.sines[op.rope] + token * op.rotated, op.rotated);
    }
    const bf16* keys = heads + op.heads * dims;
    store_kv(run.caches[op.layer], run.step->slots[token], keys, keys + op.kv_heads * dims);
  }
}

Convolution convolution_of(const Program& program, const Op& op, const Run& run) {
  Convolution convolution = *op.convolution;
  auto [x, x_stride] = program.view({op.input, op.input_offset}, run);
  auto [before, before_stride] = program.view(op.others[0], run);
  auto [after, after_stride] = program.view(op.others[1], run);
  auto [output, output_stride] = program.view({op.output, op.output_offset}, run);
  convolution.x = x;
  convolution.x_stride = x_stride;
  convolution.before = before;
  convolution.before_stride = before_stride;
  convolution.after = after;
  convolution.after_stride = after_stride;
  convolution.output = output;
  convolution.output_stride = output_stride;
  convolution.states = run.states[2 * op.layer];
  return convolution;
}

Recurrence recurrence_of(const Program& program, const Op& op, const Run& run) {
  Recurrence recurrence = *op.recurrence;
  auto [value, value_stride] = program.view({op.input, op.input_offset}, run);
  auto [query, query_stride] = program.view(op.others[0], run);
  auto [key, key_stride] = program.view(op.others[1], run);
  auto [decay, decay_stride] = program.view(op.others[2], run);
  auto [beta, beta_stride] = program.view(op.others[3], run);
  auto [output, output_stride] = program.view({op.output, op.output_offset}, run);
  recurrence.value = value;
  recurrence.value_stride = value_stride;
  recurrence.query = query;
  recurrence.query_stride = query_stride;
  recurrence.key = key;
  recurrence.key_stride = key_stride;
  recurrence.decay = decay;
  recurrence.decay_stride = decay_stride;
  recurrence.beta = beta;
  recurrence.beta_stride = beta_stride;
  recurrence.output = output;
  recurrence.output_stride = output_stride;
  recurrence.states = static_cast<float*>(run.states[2 * op.layer + 1]);
  return recurrence;
}

void gate_rows(const Program& program, const Op& op, const Run& run, int64_t first, int64_t last) {
  Gate gate = *op.gate;
  auto [x, x_stride] = program.view({op.input, op.input_offset}, run);
  auto [by, gate_stride] = program.view(op.others[0], run);
  auto [output, output_stride] = program.view({op.output, op.output_offset}, run);
  gate.x = x;
  gate.x_stride = x_stride;
  gate.gate = by;
  gate.gate_stride = gate_stride;
  gate.output = output;
  gate.output_stride = output_stride;
  for (int64_t token = first; token < last; ++token) gate_row(gate, token);
}

Linear head_of(const Program& program, const Op& op, const Run& run, int64_t head) {
  Linear linear = linear_of(program, op, run);
  linear.x += head * op.head_input;
  linear.y = static_cast<bf16*>(linear.y) + head * op.head_output;
  linear.weight += head;
  return linear;
}

void latent_rows(const Program& program, const Op& op, const Run& run, int64_t first, int64_t last) {
  auto [queries, query_stride] = program.view({op.input, op.input_offset}, run);
  auto [outputs, output_stride] = program.view({op.output, op.output_offset}, run);
  auto [rows, row_stride] = program.view(op.others[0], run);
  const int64_t rope_dim = op.head_dim - op.value_dim;
  for (int64_t token = first; token < last; ++token) {
    auto rotate = [&](bf16* values) {
      if (op.rope >= 0)
        rotate_head(values, run.cosines[op.rope] + token * op.rotated, run.sines[op.rope] + token * op.rotated,
                    op.rotated);
    };
    for (int64_t head = 0; head < op.heads; ++head) {
      const bf16* from = queries + token * query_stride + (head + 1) * op.head_input - rope_dim;
      bf16* to = outputs + token * output_stride + head * op.head_dim + op.value_dim;
      std::memcpy(to, from, size_t(rope_dim) * sizeof(bf16));
      rotate(to);
    }
    bf16* row = rows + token * row_stride;
    rotate(row + op.value_dim);
    store_kv(run.caches[op.layer], run.step->slots[token], row, nullptr);
  }
}

void run_ticket(void* context, int64_t ticket, int thread) {
  const Part& part = *static_cast<const Part*>(context);
  const Program& program = *part.program;
  const Run& run = program.run;
  const Op& op = *part.op;
  int64_t first = ticket * ROWS_AT_ONCE, last = std::min(first + ROWS_AT_ONCE, run.tokens);
  switch (op.kind) {
    case NORM:
      return norm_rows(program, op, run, first, last);
    case LINEAR:
      return linear_run(linear_of(program, op, run), ticket);
    case ROTATE:
      return rotate_rows(program, op, run, first, last);
    case CONVOLVE:
      return convolution_run(convolution_of(program, op, run), *run.slots, ticket);
    case RECUR:
      return recurrence_run(recurrence_of(program, op, run), *run.slots, run.threads, ticket);
    case HEADS: {
      const Linear first_head = head_of(program, op, run, 0);
      const int64_t tickets = linear_tickets(first_head);
      return linear_run(head_of(program, op, run, ticket / tickets), ticket % tickets);
    }
    case LATENT:
      return latent_rows(program, op, run, first, last);
    case GATE:
      return gate_rows(program, op, run, first, last);
    case ATTEND: {
      const AttentionPlan& plan = program.plans[part.plan];
      Attention attention = attention_of(program, op, run);
      if (part.merging) return attention_merge_run(attention, *run.step, plan, ticket, thread);
      return attention_run(attention, *run.step, plan, ticket, thread);
    }
  }
}

// Which stages a run of so many tokens has, and the attention plans that they share.
void prepare(Program& program) {
  const Run& run = program.run;
  for (size_t i = 0; i < program.plans.size() && run.first == 0; ++i) {
    const Op& op = program.ops[program.planned_for[i]];
    plan_attention(*run.step, shape_of(op), program.plans[i]);
  }
  std::vector<Part>& parts = program.parts;
  parts.clear();
  int64_t row_tickets = (run.tokens + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int64_t i = run.first; i < run.last; ++i) {
    const Op& op = program.ops[size_t(i)];
    Part part{&program, &op, row_tickets, 0, false};
    if (op.kind == LINEAR) part.tickets = linear_tickets(linear_of(program, op, run));
    if (op.kind == HEADS) part.tickets = op.heads * linear_tickets(linear_of(program, op, run));
    if (op.kind == CONVOLVE) part.tickets = convolution_tickets(*op.convolution, *run.slots);
    if (op.kind == RECUR) part.tickets = recurrence_tickets(*op.recurrence, *run.slots, run.threads);
    if (op.kind == ATTEND) {
      part.plan = program.plan_of(op);
      const AttentionPlan& plan = program.plans[part.plan];
      part.tickets = attention_tickets(plan);
      parts.push_back(part);
      part.tickets = attention_merge_tickets(plan);
      part.merging = true;
      if (!part.tickets) continue;
    }
    parts.push_back(part);
  }
  program.stages.clear();
  for (Part& part : parts) program.stages.push_back({run_ticket, &part, part.tickets});
}

}  // namespace
}  // namespace tgi

using namespace tgi;

// `ops` and what they point to, except the list itself, must outlive the program.
TGI_EXPORT void* tgi_program_new(const Op* ops, int64_t num_ops, const int64_t* widths,
                                 int64_t num_buffers) {
  auto* program = new Program;
  program->ops.assign(ops, ops + num_ops);
  program->widths.assign(widths, widths + num_buffers);
  program->places.resize(size_t(num_buffers));
  for (size_t i = 2; i < program->widths.size(); ++i) {
    program->places[i] = program->width;
    program->width += (program->widths[i] + 31) / 32 * 32;
  }
  for (size_t i = 0; i < program->ops.size(); ++i)
    if (program->ops[i].kind == ATTEND && program->plan_of(program->ops[i]) == program->plans.size()) {
      program->planned_for.push_back(i);
      program->plans.emplace_back();
    }
  return program;
}

TGI_EXPORT void tgi_program_free(void* program) { delete static_cast<Program*>(program); }

// 0, or 1 if there is no memory for so many tokens.
TGI_EXPORT int tgi_program_run(void* handle, const Run* arguments) {
  Program& program = *static_cast<Program*>(handle);
  program.run = *arguments;
  const Run& run = program.run;
  if (!run.tokens) return 0;
  if (!program.reserve(run.tokens)) return 1;
  prepare(program);
  double* seconds = nullptr;
  if (run.seconds) {
    program.seconds.assign(program.stages.size(), 0.0);
    seconds = program.seconds.data();
  }
  run_stages(run.threads, program.stages.data(), program.stages.size(), seconds);
  if (seconds)
    for (size_t i = 0; i < program.parts.size(); ++i)
      run.seconds[program.parts[i].op - program.ops.data()] += seconds[i];
  return 0;
}
