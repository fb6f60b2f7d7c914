#define QKV_ISA portable
#define QKV_NAME "portable"
#include "kernels.inc"
