/* A CUDA driver without a GPU: it takes modules and launches as Triton hands them over, and counts the launches.
   Built as libcuda.so.1 (see launch_kernels.py). Nothing runs, so pointers may be a CPU's. */

#define TAKES(name) int name() { return 0; }

TAKES(cuInit)
TAKES(cuCtxSetCurrent)
TAKES(cuCtxSetLimit)
TAKES(cuFuncSetAttribute)
TAKES(cuFuncSetCacheConfig)
TAKES(cuTensorMapEncodeTiled)
TAKES(cuTensorMapEncodeIm2col)

static int something;
static int give(void **handle) {
  *handle = &something;
  return 0;
}

int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetCurrent(void **context) { return give(context); }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetLimit(unsigned long *value, int limit) { *value = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return give(context); }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = *active = 0; return 0; }
int cuModuleLoadData(void **module, const void *image) { return give(module); }
int cuModuleGetFunction(void **function, void *module, const char *name) { return give(function); }
int cuPointerGetAttribute(void **value, int attribute, void *pointer) { *value = pointer; return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, const void *config) { *count = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "the absent driver's error"; return 0; }

/* Most threads of a program, registers of a thread, and no local memory; of the device, what an H200 has. */
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : attribute == 4 ? 128 : 0;
  return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 8: *value = 49152; break;    /* shared memory of a program */
    case 10: *value = 32; break;      /* threads of a warp */
    case 12: *value = 65536; break;   /* registers of a program */
    case 16: *value = 132; break;     /* multiprocessors */
    case 75: *value = 9; break;       /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break;  /* shared memory of a multiprocessor */
    case 97: *value = 232448; break;  /* shared memory of a program that asks for it */
    default: *value = 1000000;
  }
  return 0;
}

struct launch { unsigned grid[3], block[3], shared; };
int absent_launches;
struct launch absent_last;

int cuLaunchKernelEx(const struct launch *config, void *function, void **parameters, void **extra) {
  absent_last = *config;
  absent_launches++;
  return 0;
}
