/* A driver for tests: it launches nothing, takes its time, and checks what a real one would refuse.
 *
 * Contexts, streams, modules and graphs are structures that know what they belong to. A launch needs a current context
 * in the calling thread that is the stream's, and a kernel of that context. It sleeps 50 us (with FAKE_LONG=1 2 ms, of
 * which a busy machine takes less notice), so that no core is needed; with FAKE_LOCK=process or FAKE_LOCK=context it holds
 * a lock of the process, or of the context, meanwhile.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CONTEXT = 1, STREAM, MODULE, FUNCTION, GRAPH, EXECUTABLE, EVENT };
enum { OK = 0, INVALID = 1, NO_CONTEXT = 201, WRONG_HANDLE = 400, NOT_READY = 600 };

typedef struct Thing {
    int kind, capturing, nodes;
    struct Thing *context;
    pthread_mutex_t lock;
} Thing;

static __thread Thing *current;
static Thing *primary;
static pthread_mutex_t process = PTHREAD_MUTEX_INITIALIZER;

static Thing *make(int kind) {
    Thing *thing = calloc(1, sizeof *thing);
    thing->kind = kind;
    thing->context = current;
    pthread_mutex_init(&thing->lock, NULL);
    return thing;
}
static int is(Thing *thing, int kind) { return thing && thing->kind == kind; }
static int here(Thing *thing, int kind) {
    if (!thing && kind == STREAM) return !current ? NO_CONTEXT : OK; /* the context's default one */
    return !current ? NO_CONTEXT : is(thing, kind) && thing->context == current ? OK : WRONG_HANDLE;
}
static void spend(void) {
    const char *text = getenv("FAKE_LOCK"), *long_ones = getenv("FAKE_LONG");
    struct timespec t = {0, long_ones ? 2000000 : 50000};
    pthread_mutex_t *lock = !text ? NULL : strcmp(text, "process") ? &current->lock : &process;
    if (lock) pthread_mutex_lock(lock);
    nanosleep(&t, NULL);
    if (lock) pthread_mutex_unlock(lock);
}

int cuInit(unsigned flags) { return flags; }
int cuGetErrorString(int status, const char **text) { *text = "as the fake says"; return status ? OK : INVALID; }
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? INVALID : OK; }
int cuDeviceGetName(char *text, int length, int device) { strncpy(text, "a fake GPU", length); return device; }
int cuDevicePrimaryCtxRetain(Thing **context, int device) {
    pthread_mutex_lock(&process);
    if (!primary) primary = make(CONTEXT);
    pthread_mutex_unlock(&process);
    *context = primary;
    return device;
}
int cuCtxCreate_v2(Thing **context, unsigned flags, int device) { *context = current = make(CONTEXT); return flags || device; }
int cuCtxSetCurrent(Thing *context) { current = context; return is(context, CONTEXT) ? OK : INVALID; }
int cuCtxDestroy_v2(Thing *context) { return is(context, CONTEXT) && context != primary ? OK : INVALID; }
int cuStreamCreate(Thing **stream, unsigned flags) {
    *stream = make(STREAM);
    return !current ? NO_CONTEXT : flags == 1 ? OK : INVALID;
}
int cuStreamSynchronize(Thing *stream) { return here(stream, STREAM); }
int cuStreamDestroy_v2(Thing *stream) { return here(stream, STREAM); }
int cuModuleLoadData(Thing **module, const char *image) {
    if (current) spend();
    *module = make(MODULE);
    return !current ? NO_CONTEXT : strstr(image, ".version") && strstr(image, ".entry nothing") ? OK : INVALID;
}
int cuModuleUnload(Thing *module) { return here(module, MODULE); }
int cuModuleGetFunction(Thing **function, Thing *module, const char *name) {
    *function = make(FUNCTION);
    return strcmp(name, "nothing") && strcmp(name, "busy") ? INVALID : here(module, MODULE);
}
int cuEventCreate(Thing **event, unsigned flags) { *event = make(EVENT); return flags == 2 ? OK : INVALID; }
int cuEventQuery(Thing *event) { spend(); return is(event, EVENT) ? NOT_READY : WRONG_HANDLE; }
int cuStreamQuery(Thing *stream) { spend(); return here(stream, STREAM); }
int cuEventRecord(Thing *event, Thing *stream) { spend(); return here(event, EVENT) | here(stream, STREAM); }
int cuEventSynchronize(Thing *event) { return here(event, EVENT); }
int cuMemAlloc_v2(void **memory, uint64_t bytes) { spend(); *memory = malloc(bytes); return !current ? NO_CONTEXT : OK; }
int cuMemFree_v2(void *memory) { free(memory); return !current ? NO_CONTEXT : OK; }
int cuMemAllocAsync(void **memory, uint64_t bytes, Thing *stream) { return cuMemAlloc_v2(memory, bytes) | here(stream, STREAM); }
int cuMemFreeAsync(void *memory, Thing *stream) { return cuMemFree_v2(memory) | here(stream, STREAM); }
int cuMemAllocHost_v2(void **memory, uint64_t bytes) { return cuMemAlloc_v2(memory, bytes); }
int cuMemFreeHost(void *memory) { return cuMemFree_v2(memory); }
int cuMemcpyHtoDAsync_v2(void *to, const void *from, uint64_t bytes, Thing *stream) {
    spend();
    memcpy(to, from, bytes);
    return here(stream, STREAM);
}
int cuPointerGetAttribute(unsigned *kind, int which, void *memory) {
    spend();
    *kind = 2;
    return which == 2 && memory ? OK : INVALID;
}
int cuEventDestroy_v2(Thing *event) { return here(event, EVENT); }
int cuLaunchKernel(Thing *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, Thing *stream, void **parameters, void **extra) {
    if (gx != 1 || gy != 1 || gz != 1 || bx != 32 || by != 1 || bz != 1 || shared || extra || !parameters) return INVALID;
    if (here(stream, STREAM) || here(function, FUNCTION)) return here(stream, STREAM) ? here(stream, STREAM) : WRONG_HANDLE;
    if (stream && stream->capturing) return stream->nodes++, OK;
    return spend(), OK;
}
int cuStreamBeginCapture_v2(Thing *stream, int mode) {
    if (mode != 1 || stream->capturing) return INVALID;
    stream->capturing = 1, stream->nodes = 0;
    return here(stream, STREAM);
}
int cuStreamEndCapture(Thing *stream, Thing **graph) {
    if (!stream->capturing) return INVALID;
    stream->capturing = 0;
    *graph = make(GRAPH);
    (*graph)->nodes = stream->nodes;
    return OK;
}
int cuGraphInstantiateWithFlags(Thing **executable, Thing *graph, uint64_t flags) {
    *executable = make(EXECUTABLE);
    return is(graph, GRAPH) && graph->nodes && !flags ? OK : INVALID;
}
int cuGraphDestroy(Thing *graph) { return is(graph, GRAPH) ? OK : INVALID; }
int cuGraphUpload(Thing *executable, Thing *stream) { return here(executable, EXECUTABLE) | here(stream, STREAM); }
int cuGraphLaunch(Thing *executable, Thing *stream) { return spend(), here(executable, EXECUTABLE) | here(stream, STREAM); }
int cuGraphExecDestroy(Thing *executable) { return here(executable, EXECUTABLE); }
