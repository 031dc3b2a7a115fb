// Runs a program: its operations are stages, which threads go through together (pool.h). With one
// token a layer has eight, and from one to the next takes about 0.2 us.
#include "program.h"

#include <time.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "gemm.h"
#include "heads.h"
#include "paged.h"
#include "program_buffers.h"
#include "program_rows.h"

#define TGI_EXPORT extern "C" __attribute__((visibility("default")))

namespace tgi {
namespace {

// Tokens per ticket of what is done token by token: few, so that eight tokens make work for all threads; of
// prompts a tile of the KV cache, in which two threads would write to the same lines.
int64_t rows_at_once(int64_t tokens) { return tokens < 256 ? std::clamp<int64_t>(tokens / 4, 1, 8) : 16; }

struct Program;

Shape shape_of(const Op& op) {
  return {op.heads, op.kv_heads, op.head_dim, op.value_dim, op.window, op.chunk, op.spans};
}

// What a stage does of an operation: the quantization of its rows, the operation, or its last part.
enum Phase { QUANTIZE, WHOLE, MERGE };

// A stage of a run: an operation, or a part of one.
struct Part {
  const Program* program;
  const Op* op;
  int64_t tickets;
  size_t plan;  // of attention
  Phase phase;
};

struct Program {
  Run run;  // the one that is on
  std::vector<Op> ops;
  Buffers buffers;
  std::vector<AttentionPlan> plans;
  std::vector<size_t> planned_for;  // the first operation that each serves
  std::vector<Part> parts;
  std::vector<Stage> stages;
  std::vector<double> seconds;

  Rows rows(const View& view) const { return buffers.rows(view, run); }

  // The plan that an operation can share with one before it; the number of plans: with none.
  size_t plan_of(const Op& op) const {
    auto alike = [&](size_t index) { return shape_of(ops[index]) == shape_of(op); };
    auto found = std::find_if(planned_for.begin(), planned_for.end(), alike);
    return size_t(found - planned_for.begin());
  }
};

Linear linear_of(const Program& program, const Op& op) {
  Linear linear{};
  program.rows(op.input).put(linear.x, linear.x_stride);
  program.rows(op.output).put(linear.y, linear.y_stride);
  linear.rows = program.run.tokens;
  linear.weight = op.matrix;
  linear.bias = op.linear_bias;
  linear.epilogue = op.epilogue;
  linear.activation = op.activation;
  linear.scale = op.scale;
  return linear;
}

Heads heads_of(const Program& program, const Op& op) {
  return {linear_of(program, op), op.heads, op.head_input, op.head_output};
}

Attention attention_of(const Program& program, const Op& op) {
  Attention attention;
  program.rows(op.input).put(attention.query, attention.query_stride);
  program.rows(op.output).put(attention.output, attention.output_stride);
  attention.heads = op.heads;
  attention.cache = program.run.caches[op.layer];
  attention.scale = op.attention_scale;
  attention.softcap = op.softcap;
  attention.sinks = op.sinks;
  attention.window = op.window;
  attention.chunk = op.chunk;
  attention.spans = op.spans;
  attention.bias = op.attention_bias;
  attention.distances = op.distances;
  return attention;
}

Convolution convolution_of(const Program& program, const Op& op) {
  Convolution convolution = *op.convolution;
  program.rows(op.input).put(convolution.x, convolution.x_stride);
  program.rows(op.others[0]).put(convolution.before, convolution.before_stride);
  program.rows(op.others[1]).put(convolution.after, convolution.after_stride);
  program.rows(op.output).put(convolution.output, convolution.output_stride);
  convolution.states = program.run.states[2 * op.layer];
  return convolution;
}

Recurrence recurrence_of(const Program& program, const Op& op) {
  Recurrence recurrence = *op.recurrence;
  program.rows(op.input).put(recurrence.value, recurrence.value_stride);
  program.rows(op.others[0]).put(recurrence.query, recurrence.query_stride);
  program.rows(op.others[1]).put(recurrence.key, recurrence.key_stride);
  program.rows(op.others[2]).put(recurrence.decay, recurrence.decay_stride);
  program.rows(op.others[3]).put(recurrence.beta, recurrence.beta_stride);
  program.rows(op.output).put(recurrence.output, recurrence.output_stride);
  recurrence.states = static_cast<float*>(program.run.states[2 * op.layer + 1]);
  return recurrence;
}

void run_ticket(void* context, int64_t ticket, int thread) {
  const Part& part = *static_cast<const Part*>(context);
  const Program& program = *part.program;
  const Run& run = program.run;
  const Op& op = *part.op;
  switch (op.kind) {
    case LINEAR: {
      const Linear linear = linear_of(program, op);
      const QuantizedRows quantized = {program.buffers.extra(), quantized_stride(*op.matrix)};
      if (part.phase == QUANTIZE) return quantize_run(linear, quantized, ticket);
      return linear_run(linear, quantized, ticket);
    }
    case HEADS:
      return heads_run(heads_of(program, op), ticket);
    case CONVOLVE:
      return convolution_run(convolution_of(program, op), *run.slots, ticket);
    case RECUR:
      return recurrence_run(recurrence_of(program, op), *run.slots, run.threads, ticket);
    case ATTEND: {
      const AttentionPlan& plan = program.plans[part.plan];
      const Attention attention = attention_of(program, op);
      if (part.phase == MERGE) return attention_merge_run(attention, *run.step, plan, ticket, thread);
      return attention_run(attention, *run.step, plan, ticket, thread);
    }
    default: {
      const int64_t rows = rows_at_once(run.tokens), first = ticket * rows;
      return run_rows(program.buffers, op, run, first, std::min(first + rows, run.tokens));
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
  const int64_t rows = rows_at_once(run.tokens), row_tickets = (run.tokens + rows - 1) / rows;
  for (int64_t i = run.first; i < run.last; ++i) {
    const Op& op = program.ops[size_t(i)];
    Part part{&program, &op, row_tickets, 0, WHOLE};
    if (op.kind == LINEAR) {
      const Linear linear = linear_of(program, op);
      const int64_t quantizing = quantize_tickets(linear);
      if (quantizing) parts.push_back({&program, &op, quantizing, 0, QUANTIZE});
      part.tickets = linear_tickets(linear);
    }
    if (op.kind == HEADS) part.tickets = heads_tickets(heads_of(program, op));
    if (op.kind == CONVOLVE) part.tickets = convolution_tickets(*op.convolution, *run.slots);
    if (op.kind == RECUR) part.tickets = recurrence_tickets(*op.recurrence, *run.slots, run.threads);
    if (op.kind == ATTEND) {
      part.plan = program.plan_of(op);
      const AttentionPlan& plan = program.plans[part.plan];
      part.tickets = attention_tickets(plan);
      parts.push_back(part);
      part.tickets = attention_merge_tickets(plan);
      part.phase = MERGE;
      if (!part.tickets) continue;
    }
    parts.push_back(part);
  }
  program.stages.clear();
  for (Part& part : parts) program.stages.push_back({run_ticket, &part, part.tickets});
}

// Experts, whose tickets follow from a choice that is made while the program runs.
void run_experts(Program& program, const Op& op) {
  Experts experts = *op.mixture;
  program.rows(op.input).put(experts.x, experts.x_stride);
  program.rows(op.output).put(experts.y, experts.y_stride);
  experts.tokens = program.run.tokens;
  timespec before, after;
  clock_gettime(CLOCK_MONOTONIC, &before);
  experts_run(experts, program.run.threads);
  clock_gettime(CLOCK_MONOTONIC, &after);
  if (program.run.seconds)
    program.run.seconds[&op - program.ops.data()] +=
        double(after.tv_sec - before.tv_sec) + 1e-9 * double(after.tv_nsec - before.tv_nsec);
}

// The operations of a run that are stages.
void run_operations(Program& program) {
  const Run& run = program.run;
  prepare(program);
  if (program.stages.empty()) return;
  double* seconds = nullptr;
  if (run.seconds) {
    program.seconds.assign(program.stages.size(), 0.0);
    seconds = program.seconds.data();
  }
  run_stages(run.threads, program.stages.data(), program.stages.size(), seconds);
  if (seconds)
    for (size_t i = 0; i < program.parts.size(); ++i)
      run.seconds[program.parts[i].op - program.ops.data()] += seconds[i];
}

}  // namespace
}  // namespace tgi

using namespace tgi;

// `ops` and what they point to, except the list itself, must outlive the program.
TGI_EXPORT void* tgi_program_new(const Op* ops, int64_t num_ops, const int64_t* widths,
                                 int64_t num_buffers) {
  int64_t quantized = 0;  // bytes of the longest quantized row
  for (const Op* op = ops; op != ops + num_ops; ++op)
    if (op->kind == LINEAR) quantized = std::max(quantized, quantized_stride(*op->matrix));
  Buffers buffers(widths, size_t(num_buffers), quantized);
  auto* program = new Program{{}, {ops, ops + num_ops}, std::move(buffers), {}, {}, {}, {}, {}};
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
  Run& run = program.run;
  if (!run.tokens) return 0;
  if (!program.buffers.reserve(run.tokens)) return 1;
  for (; run.first < arguments->last; run.first = run.last + 1) {
    const auto is_experts = [](const Op& op) { return op.kind == EXPERTS; };
    const auto begin = program.ops.begin();
    const auto found = std::find_if(begin + run.first, begin + arguments->last, is_experts);
    run.last = found - begin;
    run_operations(program);
    if (run.last < arguments->last) run_experts(program, *found);
  }
  return 0;
}
