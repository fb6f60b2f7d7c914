#define QKV_ISA avx2
#define QKV_NAME "avx2"
#include "kernels.inc"
