/* A stand-in for the Ascend ACL runtime: the host's memory plays the device's memory.
 *
 * These are the functions whose results torch_npu 2.13.0 reads. Every other name that its binaries link or look up is
 * added by build.py as a function that returns 0 (success, null). Kernels are NOT here: aclnn* names are left out on
 * purpose, so that an operator which nobody gave a Python kernel raises instead of leaving garbage in its output.
 *
 * Signatures: torch_npu/include/third_party/acl/inc/acl of the wheel. Opaque handles are plain pointers here.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int aclError;
typedef void *handle;

enum { ACL_SUCCESS = 0, ACL_ERROR_OP_NOT_FOUND = 100024, ACL_ERROR_RT_MEMORY_ALLOCATION = 207001 };
enum { EVENT_COMPLETE = 1, WAIT_COMPLETE = 0, STREAM_COMPLETE = 0 };
enum { LOCATION_HOST = 0, LOCATION_UNREGISTERED = 2 };

static const size_t DEVICE_BYTES = (size_t)64 << 30; /* an Ascend 910B2 has 64 GiB */
static const size_t ALIGNMENT = 512;                 /* what aclrtMalloc promises */

/* ---- start-up and identity ---- */
aclError aclInit(const char *config) { return ACL_SUCCESS; }
const char *aclGetRecentErrMsg(void) { return "simulated device: this kernel does not exist here"; }
const char *aclrtGetSocName(void) { return "Ascend910B2"; }

/* aclCANNPackageVersion: version, then major, minor, release, patch, reserved. */
struct package_version { char version[128]; char part[4][64]; char reserved[128]; };
aclError aclsysGetCANNVersion(int package, struct package_version *version)
{
    static const struct package_version nine = {"9.0.0", {"9", "0", "0", "0"}, ""};
    *version = nine;
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *package, char *version)
{
    strcpy(version, "9.0.0");
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceCount(uint32_t *count) { *count = 1; return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t *device) { *device = 0; return ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t device) { return device == 0 ? ACL_SUCCESS : 107001; }
aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) { *can = 0; return ACL_SUCCESS; }

aclError aclrtGetCurrentContext(handle *context)
{
    static char the_context;
    *context = &the_context;
    return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    if (flags) *flags = 0;
    *active = 1;
    return ACL_SUCCESS;
}

/* Core counts of a 910B2: 24 cube cores, 48 vector cores. */
aclError aclGetDeviceCapability(uint32_t device, int info, int64_t *value)
{
    *value = info == 0 ? 24 : info == 1 ? 48 : (int64_t)192 << 20;
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value)
{
    switch (attribute) {
    case 101: case 102: *value = 24; break;                /* AI cores, cube cores */
    case 201: *value = 48; break;                          /* vector cores */
    case 301: *value = (int64_t)DEVICE_BYTES; break;
    case 302: *value = (int64_t)192 << 20; break;          /* L2 cache */
    default: *value = 0;
    }
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, char uuid[16]) { memset(uuid, 0, 16); return ACL_SUCCESS; }

aclError aclrtGetDeviceResLimit(int32_t device, int type, uint32_t *value) { *value = type ? 48 : 24; return ACL_SUCCESS; }
aclError aclrtGetStreamResLimit(handle stream, int type, uint32_t *value) { *value = type ? 48 : 24; return ACL_SUCCESS; }
aclError aclrtGetResInCurrentThread(int type, uint32_t *value) { *value = type ? 48 : 24; return ACL_SUCCESS; }

/* Every capability (infinities kept, bfloat16, binary kernels) is there, as on a 910B2. */
aclError aclGetCannAttribute(int attribute, int32_t *value) { *value = 1; return ACL_SUCCESS; }

/* Asked for the just-in-time compilation of operators, which is off on a 910B. */
size_t aclGetCompileoptSize(int option) { return sizeof("disable"); }
aclError aclGetCompileopt(int option, char *value, size_t length)
{
    strncpy(value, "disable", length);
    return ACL_SUCCESS;
}

/* ---- memory ---- */
static aclError take(void **pointer, size_t size)
{
    size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    *pointer = aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT);
    if (!*pointer) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    /* Fresh device memory is not zero: NaN bytes in every float format show a read before a write. */
    memset(*pointer, 0xff, rounded);
    return ACL_SUCCESS;
}

aclError aclrtMalloc(void **pointer, size_t size, int policy) { return take(pointer, size); }
aclError aclrtMallocAlign32(void **pointer, size_t size, int policy) { return take(pointer, size); }
aclError aclrtMallocHost(void **pointer, size_t size) { return take(pointer, size); }
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, void *config) { return take(pointer, size); }
aclError aclrtFree(void *pointer) { free(pointer); return ACL_SUCCESS; }
aclError aclrtFreeHost(void *pointer) { free(pointer); return ACL_SUCCESS; }

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind)
{
    memmove(to, from, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, handle stream)
{
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemset(void *pointer, size_t room, int32_t value, size_t count)
{
    memset(pointer, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t count, handle stream)
{
    return aclrtMemset(pointer, room, value, count);
}

aclError aclrtGetMemInfo(int attribute, size_t *available, size_t *total)
{
    *total = DEVICE_BYTES;
    *available = DEVICE_BYTES - ((size_t)1 << 30);
    return ACL_SUCCESS;
}

struct pointer_attributes { uint32_t id; int location; uint32_t page_size; uint32_t reserved[4]; };
aclError aclrtPointerGetAttributes(const void *pointer, struct pointer_attributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->location = LOCATION_UNREGISTERED;
    return ACL_SUCCESS;
}

/* ---- streams: everything has finished when a call returns ---- */
aclError aclrtCreateStreamWithConfig(handle *stream, uint32_t priority, uint32_t flag)
{
    *stream = malloc(1);
    return ACL_SUCCESS;
}
aclError aclrtCreateStream(handle *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(handle stream) { free(stream); return ACL_SUCCESS; }
aclError aclrtStreamQuery(handle stream, int *status) { *status = STREAM_COMPLETE; return ACL_SUCCESS; }
aclError aclrtStreamGetId(handle stream, int32_t *id) { *id = 0; return ACL_SUCCESS; }

aclError aclrtLaunchHostFunc(handle stream, void (*function)(void *), void *argument)
{
    function(argument);
    return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(void (*function)(void *), void *argument, int block, handle stream)
{
    return aclrtLaunchHostFunc(stream, function, argument);
}

/* ---- events: a reading of the host's clock, in nanoseconds ---- */
aclError aclrtCreateEventExWithFlag(handle *event, uint32_t flag)
{
    *event = calloc(1, sizeof(uint64_t));
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(handle *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtDestroyEvent(handle event) { free(event); return ACL_SUCCESS; }

aclError aclrtRecordEvent(handle event, handle stream)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *(uint64_t *)event = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    return ACL_SUCCESS;
}

aclError aclrtQueryEventStatus(handle event, int *status) { *status = EVENT_COMPLETE; return ACL_SUCCESS; }
aclError aclrtQueryEventWaitStatus(handle event, int *status) { *status = WAIT_COMPLETE; return ACL_SUCCESS; }

aclError aclrtEventElapsedTime(float *milliseconds, handle start, handle end)
{
    *milliseconds = (float)((double)(int64_t)(*(uint64_t *)end - *(uint64_t *)start) * 1e-6);
    return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(handle event, uint64_t *microseconds)
{
    *microseconds = *(uint64_t *)event / 1000;
    return ACL_SUCCESS;
}

/* ---- operators of the old kind: refused aloud, like the aclnn ones that are not exported ---- */
aclError aclopCompileAndExecute(const char *name, ...) { return ACL_ERROR_OP_NOT_FOUND; }
aclError aclopCompileAndExecuteV2(const char *name, ...) { return ACL_ERROR_OP_NOT_FOUND; }
aclError aclopExecuteV2(const char *name, ...) { return ACL_ERROR_OP_NOT_FOUND; }
