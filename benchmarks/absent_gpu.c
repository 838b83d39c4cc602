/* Two answers that torch's C++ wants of a GPU that is not there; see absent_gpu.py. Built as libcuda.so.1, so that what
   looks for the driver finds it, and loaded before torch. */
int absent_gpu_devices = 0;

/* c10::cuda::device_count() */
signed char _ZN3c104cuda12device_countEv(void) { return absent_gpu_devices; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 0;
  return 0;
}
