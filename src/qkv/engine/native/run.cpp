// The runtime: a program is a list of instructions over buffers of M rows, one row per token. All threads go through the
// list together, each with its share of every instruction, and meet after each.
//
//   op        out  in  other   n                                                        x              p
//   EMBED     buf                                                                       scale          matrix
//   PLACE     buf              offset                                                                  table (positions, width)
//   NORM      buf  buf         groups, width of one, centre                             eps            weight, bias
//   CODES     codes buf        width
//   LINEAR    buf  buf codes   add, first column of out                                                matrix, bias
//   ROTATE    buf              first column, heads, width of one, turned, pairs                        cos, sin (positions, turned / 2)
//   STORE          buf         columns of keys and values, heads, their widths, layer, group
//   ATTEND    buf  buf         first column, heads, kv heads, widths, layer, group, behind, sinks
//                                                                                       scale, softcap  slopes
//   ACT       buf  buf         kind, columns of gate and up (-1: none), width
//   ADD       buf  buf                                                                  (out += in)
//   SCALE     buf                                                                       factor
//   CAP       buf                                                                       cap
//   WANTED    buf  buf         the rows that are wanted; all later instructions run on those
//
// A row knows its token, its line in the cache, and its position.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "engine.h"
#include "team.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__x86_64__)
namespace avx512 { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
#endif
namespace portable { extern const Kernels kernels; }

namespace {

enum Op { EMBED, PLACE, NORM, CODES, LINEAR, ROTATE, STORE, ATTEND, ACT, ADD, SCALE, CAP, WANTED };

struct Free { void operator()(void* p) const { std::free(p); } };
template <class T> using Array = std::unique_ptr<T, Free>;

template <class T> Array<T> array(size_t n) {
  void* p = nullptr;
  if (posix_memalign(&p, 64, std::max<size_t>(n * sizeof(T), 64))) throw std::bad_alloc();
  return Array<T>(static_cast<T*>(p));
}

struct Program {
  std::vector<Instruction> list;
  std::vector<int> width, code_width;
  const Kernels* kernels;
  Team team;
  int room = 0, longest = 0;
  std::vector<Array<float>> buffer;
  struct Coded { Array<int8_t> code; Array<float> scale, sum; Array<int32_t> whole; Codes view; };
  std::vector<Coded> coded;
  std::vector<Array<float>> scores;  // one per thread
  std::vector<int> tiles;            // the first row of each, and the end
  Call call{};

  Program(const Instruction* from, int n, const int32_t* widths, int n_buffers, const int32_t* codes, int n_codes,
          const Kernels* k, int threads)
      : list(from, from + n), width(widths, widths + n_buffers), code_width(codes, codes + n_codes), kernels(k),
        team(threads) {}

  void reserve(int M, int keys) {
    if (M > room) {
      buffer.clear();
      coded.clear();
      for (int w : width) buffer.push_back(array<float>((size_t)M * w));
      for (int w : code_width) {
        size_t G = (w + GROUP - 1) / GROUP;
        Coded c{array<int8_t>(M * G * GROUP), array<float>(M * G), array<float>(M * G), array<int32_t>(M * G), {}};
        c.view = {c.code.get(), c.scale.get(), c.sum.get(), c.whole.get()};
        coded.push_back(std::move(c));
      }
      room = M;
    }
    if (keys > longest) {
      scores.clear();
      longest = keys + keys / 2;
      int widest = 0;
      for (const Instruction& i : list) widest = i.op == ATTEND ? std::max(widest, i.n[3]) : widest;
      for (int t = 0; t < team.size(); t++) scores.push_back(array<float>(16 * ((size_t)longest + widest + 1)));
    }
  }

  void cut() {
    tiles.clear();
    for (int r = 0; r < call.M; r++)
      if (r == 0 || call.line[r] != call.line[r - 1] || r - tiles.back() == 16) tiles.push_back(r);
    tiles.push_back(call.M);
  }
};

// The share of thread t in n pieces of work.
struct Share {
  int first, last;
  Share(int n, int t, int threads) : first((int64_t)n * t / threads), last((int64_t)n * (t + 1) / threads) {}
};

struct Step {
  Program& p;
  int t, threads, M;
  float* buf(int i) const { return p.buffer[i].get(); }

  void embed(const Instruction& i) {
    const Matrix& w = *(const Matrix*)i.p[0];
    int D = p.width[i.out];
    Share mine(M, t, threads);
    for (int r = mine.first; r < mine.last; r++) {
      float* out = buf(i.out) + (size_t)r * D;
      p.kernels->unpack(w, p.call.token[r], out);
      if (i.x[0] != 1.0f) for (int k = 0; k < D; k++) out[k] *= i.x[0];
    }
  }

  void place(const Instruction& i) {
    int D = p.width[i.out];
    Share mine(M, t, threads);
    for (int r = mine.first; r < mine.last; r++) {
      float* out = buf(i.out) + (size_t)r * D;
      const float* row = (const float*)i.p[0] + (size_t)(p.call.position[r] + i.n[0]) * D;
      for (int k = 0; k < D; k++) out[k] += row[k];
    }
  }

  void norm(const Instruction& i) {
    int groups = i.n[0], width = i.n[1], in_ld = p.width[i.in], out_ld = p.width[i.out];
    Share mine(M * groups, t, threads);
    for (int at = mine.first; at < mine.last; at++) {
      int r = at / groups, g = at % groups;
      p.kernels->norm(buf(i.in) + (size_t)r * in_ld + i.n[3] + g * width, (const float*)i.p[0], (const float*)i.p[1],
                      i.x[0], i.n[2], width, buf(i.out) + (size_t)r * out_ld + i.n[3] + g * width);
    }
  }

  void codes(const Instruction& i) {
    Share mine(M, t, threads);
    for (int r = mine.first; r < mine.last; r++)
      p.kernels->quantise(buf(i.in) + (size_t)r * p.width[i.in], i.n[0], p.coded[i.out].view, r);
  }

  void linear(const Instruction& i) {
    const Matrix& w = *(const Matrix*)i.p[0];
    Share mine((w.rows + ROWS - 1) / ROWS, t, threads);
    static const Codes none{};
    p.kernels->product(w, buf(i.in), p.width[i.in], i.other < 0 ? none : p.coded[i.other].view, M, mine.first,
                       mine.last, (const float*)i.p[1], buf(i.out) + i.n[1], p.width[i.out], i.n[0]);
  }

  void rotate(const Instruction& i) {
    int heads = i.n[1], width = i.n[2], half = i.n[3] / 2, ld = p.width[i.out];
    Share mine(M * heads, t, threads);
    for (int at = mine.first; at < mine.last; at++) {
      int r = at / heads, h = at % heads;
      float* x = buf(i.out) + (size_t)r * ld + i.n[0] + h * width;
      const float* c = (const float*)i.p[0] + (size_t)p.call.position[r] * half;
      const float* s = (const float*)i.p[1] + (size_t)p.call.position[r] * half;
      for (int k = 0; k < half; k++) {
        float &a = x[i.n[4] ? 2 * k : k], &b = x[i.n[4] ? 2 * k + 1 : k + half];
        float u = a * c[k] - b * s[k], v = b * c[k] + a * s[k];
        a = u;
        b = v;
      }
    }
  }

  void store(const Instruction& i) {
    const Streams& to = p.call.layers[i.n[5]];
    const Slots& slots = p.call.groups[i.n[6]];
    int heads = i.n[2], kw = i.n[3], vw = i.n[4], ld = p.width[i.in];
    Share mine(M, t, threads);
    for (int r = mine.first; r < mine.last; r++)
      for (int h = 0; h < heads; h++) {
        const float* from = buf(i.in) + (size_t)r * ld;
        int64_t line = p.call.line[r], slot = slots.to[r];
        std::memcpy(to.keys + line * to.key_line + h * to.key_head + slot * kw, from + i.n[0] + h * kw, kw * 4);
        std::memcpy(to.values + line * to.value_line + h * to.value_head + slot * vw, from + i.n[1] + h * vw, vw * 4);
      }
  }

  // Rows of one line that stand together, up to 16 of them, are a tile; tiles and heads go around among the threads,
  // since later tiles see more.
  void attend(const Instruction& i) {
    int heads = i.n[1], count = (int)p.tiles.size() - 1;
    for (int at = t; at < count * heads; at += threads) {
      int r = p.tiles[at / heads], rows = p.tiles[at / heads + 1] - r;
      Look one = seen(i, r, at % heads);
      one.last = std::max(one.last, seen(i, r + rows - 1, at % heads).last);
      if (rows >= 4) {
        Looks all{one, p.call.position + r, rows, p.width[i.in], p.width[i.out]};
        p.kernels->looks(all, p.scores[t].get());
        continue;
      }
      for (int row = r; row < r + rows; row++) p.kernels->look(seen(i, row, at % heads), p.scores[t].get());
    }
  }

  // What one head of one row looks at.
  Look seen(const Instruction& i, int r, int h) {
    const Streams& from = p.call.layers[i.n[5]];
    const Slots& slots = p.call.groups[i.n[6]];
    int g = h / (i.n[1] / i.n[2]), position = p.call.position[r];
    int64_t line = p.call.line[r];
    Look one{};
    one.q = buf(i.in) + (size_t)r * p.width[i.in] + i.n[0] + h * i.n[3];
    one.keys = from.keys + line * from.key_line + g * from.key_head;
    one.values = from.values + line * from.value_line + g * from.value_head;
    one.positions = slots.positions ? slots.positions + line * slots.capacity : nullptr;
    one.out = buf(i.out) + (size_t)r * p.width[i.out] + h * i.n[4];
    one.width = i.n[3];
    one.value_width = i.n[4];
    one.last = slots.positions ? slots.used : position + 1;
    one.position = position;
    one.behind = i.n[7];
    one.sinks = i.n[8];
    one.scale = i.x[0];
    one.softcap = i.x[1];
    one.slope = i.p[0] ? ((const float*)i.p[0])[h] : 0.0f;
    return one;
  }

  void act(const Instruction& i) {
    int n = i.n[3], pieces = M * ((n + 63) / 64), per = (n + 63) / 64;
    Share mine(pieces, t, threads);
    for (int at = mine.first; at < mine.last; at++) {
      int r = at / per, k = at % per * 64, m = std::min(64, n - k);
      const float* in = buf(i.in) + (size_t)r * p.width[i.in] + k;
      p.kernels->act(i.n[0], in + i.n[1], i.n[2] < 0 ? nullptr : in + i.n[2],
                     buf(i.out) + (size_t)r * p.width[i.out] + k, m);
    }
  }

  void each(const Instruction& i) {
    int ld = p.width[i.out];
    Share mine(M, t, threads);
    for (int r = mine.first; r < mine.last; r++) {
      float* out = buf(i.out) + (size_t)r * ld;
      if (i.op == ADD) {
        const float* in = buf(i.in) + (size_t)r * ld;
        for (int k = 0; k < ld; k++) out[k] += in[k];
      } else if (i.op == SCALE) {
        for (int k = 0; k < ld; k++) out[k] *= i.x[0];
      } else {
        p.kernels->cap(out, i.x[0], ld);
      }
    }
  }

  void wanted(const Instruction& i) {
    int ld = p.width[i.in];
    Share mine(p.call.W, t, threads);
    for (int r = mine.first; r < mine.last; r++)
      std::memcpy(buf(i.out) + (size_t)r * ld, buf(i.in) + (size_t)p.call.wanted[r] * ld, (size_t)ld * 4);
  }

  void go() {
    for (const Instruction& i : p.list) {
      switch (i.op) {
        case EMBED: embed(i); break;
        case PLACE: place(i); break;
        case NORM: norm(i); break;
        case CODES: codes(i); break;
        case LINEAR: linear(i); break;
        case ROTATE: rotate(i); break;
        case STORE: store(i); break;
        case ATTEND: attend(i); break;
        case ACT: act(i); break;
        case WANTED: wanted(i); break;
        default: each(i);
      }
      p.team.meet();
      if (i.op == WANTED) M = p.call.W;
    }
  }
};

const Kernels* choose(const char* name) {
  const Kernels* all[] = {
#if defined(__x86_64__)
      __builtin_cpu_supports("avx512vnni") ? &avx512::kernels : nullptr,
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2::kernels : nullptr,
#endif
      &portable::kernels};
  for (const Kernels* one : all)
    if (one && (!*name || !std::strcmp(one->name, name))) return one;
  return nullptr;
}

}  // namespace

// name "": the best that this machine runs; null if it cannot run the named one.
EXPORT const char* qkv_kernels(const char* name) {
  const Kernels* found = choose(name);
  return found ? found->name : nullptr;
}

EXPORT void* qkv_program(const Instruction* list, int n, const int32_t* widths, int n_buffers, const int32_t* codes,
                         int n_codes, const char* kernels, int threads) {
  const Kernels* chosen = choose(kernels);
  return chosen ? new Program(list, n, widths, n_buffers, codes, n_codes, chosen, threads) : nullptr;
}

EXPORT void qkv_free(void* program) { delete (Program*)program; }

// Runs a call: what buffer `out` holds then, (W, its width), goes to `result`. 0, or 1 if there is no memory.
EXPORT int qkv_run(void* program, const Call* call) {
  Program& p = *(Program*)program;
  try {
    p.reserve(call->M, call->most_slots);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  p.call = *call;
  p.cut();
  p.team.run([](void* context, int t) {
    Program& q = *(Program*)context;
    Step{q, t, q.team.size(), q.call.M}.go();
  }, &p);
  std::memcpy(call->result, p.buffer[call->out].get(), (size_t)call->W * p.width[call->out] * sizeof(float));
  return 0;
}
