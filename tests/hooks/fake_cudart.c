/* Stands in for the CUDA runtime under a compiled module: an H200 that counts launches and computes
 * nothing. What the module does not call is not here. */
#include <stddef.h>

int launches = 0;
int capturing = 0; /* what cudaStreamIsCapturing answers */

enum { kMaxSharedPerSm = 81, kComputeMajor = 75, kSms = 16, kMaxSharedPerBlock = 97 };

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == kSms                 ? 132
           : attribute == kComputeMajor      ? 9
           : attribute == kMaxSharedPerBlock ? 232448
           : attribute == kMaxSharedPerSm    ? 233472
                                             : -1;
  return *value < 0;
}

int cudaLaunchKernelExC(const void* config, const void* kernel, void** arguments) {
  (void)config, (void)kernel, (void)arguments;
  ++launches;
  return 0;
}

int cudaStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = capturing;
  return 0;
}

int cudaGetDevice(int* device) { return *device = 0; }
int cudaSetDevice(int device) { return device; }
int cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return 0;
}
const char* cudaGetErrorString(int error) { return error == 0 ? "no error" : "not in the fake"; }
const char* cudaGetErrorName(int error) { return cudaGetErrorString(error); }

/* Called by what nvcc adds to a module. */
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}
void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  handle = binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
int __cudaLaunchKernel(void) { return 1; }
int __cudaPopCallConfiguration(void) { return 1; }
