#define QKV_ISA avx512
#define QKV_NAME "avx512"
#include "kernels.inc"
