/* Loops of launches without Python: what a thread of C, or of Python inside one call, does n times.
 *
 * Compiled at run time by whatever C compiler is there; knows CUDA by addresses of functions alone. A call is a launch
 * of a kernel or of a graph, another call of the driver, or a mock: it spins or sleeps, and holds one lock of the process
 * meanwhile or does not. Every call is timed; every `every` calls the stream is waited for, outside of the times. A job
 * ends after n calls, or the first that ends behind `stop_at` if that is not 0.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

#define WARM_UP 16

enum { SPIN, SLEEP, KERNEL, GRAPH, QUERY, ATTRIBUTE, RECORD, COPY, ALLOCATE, ALLOCATE_ASYNC, WAIT, LOAD };

typedef struct {
    int64_t kind, n, every, nanoseconds, mock_lock, user_lock, cpu, start_at, stop_at, bytes;
    void *call, *second, *third, *synchronize, *set_context, *context, *stream, *target, *event, *memory;
    void **parameters;
    float *latencies; /* nanoseconds; NULL: not kept */
    int64_t started, ended, busy, calls, error, voluntary, involuntary, cpu_nanoseconds;
} Job;

typedef int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                             void **);
typedef int (*two)(void *, void *);
typedef int (*one)(void *);
typedef int (*attribute)(void *, int, void *);
typedef int (*copy)(void *, void *, int64_t, void *);
typedef int (*allocate)(void **, int64_t);
typedef int (*allocate_async)(void **, int64_t, void *);
typedef int (*load)(void **, void *);

static pthread_mutex_t mock = PTHREAD_MUTEX_INITIALIZER, user = PTHREAD_MUTEX_INITIALIZER;

int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t cpu_time(const struct rusage *usage) { /* in nanoseconds */
    return ((int64_t)usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000000 +
           ((int64_t)usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) * 1000;
}

static void spend(const Job *job) {
    if (job->kind == SLEEP) {
        struct timespec t = {0, job->nanoseconds};
        nanosleep(&t, NULL);
        return;
    }
    const int64_t until = now() + job->nanoseconds;
    while (now() < until) {
    }
}

static int64_t launch(const Job *job) {
    return ((launch_kernel)job->call)(job->target, 1, 1, 1, 32, 1, 1, 0, job->stream, job->parameters, NULL);
}

int64_t once(const Job *job) {
    void *made = NULL;
    int64_t failed;
    switch (job->kind) {
        case KERNEL: return launch(job);
        case GRAPH: return ((two)job->call)(job->target, job->stream);
        case QUERY: ((one)job->call)(job->target); return 0; /* "not ready" is an answer */
        case ATTRIBUTE: return ((attribute)job->call)(&made, 2, job->memory); /* the kind of memory */
        case RECORD: return ((two)job->call)(job->event, job->stream);
        case COPY: return ((copy)job->call)(job->memory, job->target, job->bytes, job->stream);
        case ALLOCATE:
            failed = ((allocate)job->call)(&made, job->bytes);
            return failed ? failed : ((one)job->second)(made);
        case ALLOCATE_ASYNC:
            failed = ((allocate_async)job->call)(&made, job->bytes, job->stream);
            return failed ? failed : ((two)job->second)(made, job->stream);
        case WAIT:
            failed = launch(job);
            if (!failed) failed = ((two)job->second)(job->event, job->stream);
            return failed ? failed : ((one)job->third)(job->event);
        case LOAD:
            failed = ((load)job->call)(&made, job->target);
            return failed ? failed : ((one)job->second)(made);
        default:
            if (job->mock_lock) pthread_mutex_lock(&mock);
            spend(job);
            if (job->mock_lock) pthread_mutex_unlock(&mock);
            return 0;
    }
}

static void bind(const Job *job) {
    if (job->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(job->cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    if (job->set_context) ((one)job->set_context)(job->context);
}

static void wait_for_start(const Job *job) {
    for (;;) {
        const int64_t left = job->start_at - now();
        if (left <= 0) return;
        if (left > 500000) {
            struct timespec t = {0, left - 400000 > 900000000 ? 900000000 : left - 400000};
            nanosleep(&t, NULL);
        }
    }
}

void run_loop(Job *job) {
    for (int i = 0; i < WARM_UP; i++) once(job);
    if (job->synchronize) ((one)job->synchronize)(job->stream);
    struct rusage before_start, after_end;
    getrusage(RUSAGE_THREAD, &before_start);
    wait_for_start(job);
    job->started = now();
    int64_t busy = 0, failed = 0, i = 0;
    for (; i < job->n && !failed; i++) {
        const int64_t before = now();
        if (job->stop_at && i && before >= job->stop_at) break;
        if (job->user_lock) pthread_mutex_lock(&user);
        failed = once(job);
        if (job->user_lock) pthread_mutex_unlock(&user);
        const int64_t spent = now() - before;
        busy += spent;
        if (job->latencies) job->latencies[i] = (float)spent;
        if (job->synchronize && (i + 1) % job->every == 0) ((one)job->synchronize)(job->stream);
    }
    if (job->synchronize && !failed) failed = ((one)job->synchronize)(job->stream);
    job->busy = busy;
    job->calls = i;
    job->error = failed;
    job->ended = now();
    getrusage(RUSAGE_THREAD, &after_end);
    job->voluntary = after_end.ru_nvcsw - before_start.ru_nvcsw;
    job->involuntary = after_end.ru_nivcsw - before_start.ru_nivcsw;
    job->cpu_nanoseconds = cpu_time(&after_end) - cpu_time(&before_start);
}

static void *thread(void *job) {
    bind(job);
    run_loop(job);
    return NULL;
}

/* Run each job in a thread of its own, in which no Python runs. */
int run_threads(Job **jobs, int64_t count) {
    pthread_t threads[64];
    int64_t made = 0;
    if (count > 64) return -1;
    while (made < count && !pthread_create(&threads[made], NULL, thread, jobs[made])) made++;
    for (int64_t i = 0; i < made; i++) pthread_join(threads[i], NULL);
    return made == count ? 0 : -1;
}
