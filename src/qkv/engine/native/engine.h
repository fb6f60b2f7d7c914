// What the parts of the runtime share: matrices, activations, the instructions of a program, and the table of kernels
// that each instruction set fills.
#pragma once
#include <cstddef>
#include <cstdint>

enum Format : int32_t { FP32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

constexpr int ROWS = 16, GROUP = 32;

// A packed matrix (N, K); linear.inc says how its blocks lie.
struct Matrix {
  int32_t format, rows, columns, padding;
  const uint8_t* data;
};

// Activations as codes of 8 bits in groups of 32: x = scale * code.
struct Codes {
  int8_t* code;    // [m][G][32]
  float* scale;    // [m][G]
  float* sum;      // [m][G] scale * sum of the codes
  int32_t* whole;  // [m][G] sum of the codes
};

// Where the keys and values of one layer lie: [line][head][slot][width], float32.
struct Streams {
  float *keys, *values;
  int64_t key_line, key_head, value_line, value_head;  // strides in floats
};

// The slots of layers that keep the same tokens.
struct Slots {
  const int32_t* to;         // (M): the slot that each row is written to
  const int64_t* positions;  // [line][capacity], of each slot; null where a slot's number is its position
  int64_t capacity;
  int32_t used, padding;     // the first so many slots may hold something
};

// One call.
struct Call {
  int32_t M, W;  // rows, and how many of them are wanted
  const int32_t *token, *line, *position, *wanted;
  const Streams* layers;
  const Slots* groups;
  int32_t most_slots, out;  // out: the buffer whose rows are the result
  float* result;
};

// One step of a program. What the numbers mean stands beside each operation in run.cpp.
struct Instruction {
  int32_t op, out, in, other;
  int32_t n[10];
  float x[4];
  const void* p[4];
};

// Attention of one query head of one row to the slots first .. last - 1.
struct Look {
  const float *q, *keys, *values;
  const int64_t* positions;  // of the slots, -1: empty; null: a slot's number is its position
  float* out;
  int32_t width, value_width, first, last;
  int32_t position, behind, sinks;  // of the query; how far it looks (-1: to the start), but for the first `sinks`
  float scale, softcap, slope;      // slope: ALiBi's; 0: none. softcap 0: none
};

// The same for up to 16 rows of one line at once, a row a lane; `q` and `out` are the first row's.
struct Looks {
  Look first;
  const int32_t* position;  // of each query; `first.position` is not read
  int32_t rows, q_ld, out_ld;
};

struct Kernels {
  const char* name;
  // out[m * ld + n] for blocks first .. last - 1; `add`: to what stands there.
  void (*product)(const Matrix&, const float* x, int x_ld, const Codes&, int M, int first, int last, const float* bias,
                  float* out, int ld, bool add);
  void (*quantise)(const float* x, int K, const Codes&, int m);  // one row into row m
  void (*unpack)(const Matrix&, int row, float* out);
  void (*norm)(const float* x, const float* weight, const float* bias, float eps, bool centre, int width, float* out);
  void (*act)(int kind, const float* gate, const float* up, float* out, int n);  // up may be null
  void (*cap)(float* x, float limit, int n);
  void (*look)(const Look&, float* space);    // space: a float per slot, and 16 more
  void (*looks)(const Looks&, float* space);  // space: 16 floats per slot and per column of a query
  // Both give the same bits.
};

enum Act : int32_t { RELU, RELU2, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH };
