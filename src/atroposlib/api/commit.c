/* A thread that writes a commit to a file and syncs it while the interpreter goes on with other work and keeps its lock.
 *
 * Compiled by atroposlib/api/committer.py where there is a C compiler; elsewhere a Python thread does the same. One commit at a time: its
 * parts are added, it is begun, and when `done_fd` (an eventfd) can be read its result is in `commit`. The memory of the parts and of
 * `commit` belongs to the caller and stays as it is until then.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* As `_Commit` in committer.py. */
typedef struct {
    int64_t offset, sync_ns;
    int32_t fd, sync, error, in_sync;
} commit;

typedef struct {
    commit *now;
    struct iovec *parts;
    int64_t count, room;
    int done_fd, begun, ended;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
} committer;

/* All parts at the offset, however many system calls that takes; 0 or the error. */
static int write_parts(committer *c) {
    struct iovec *part = c->parts, *end = part + c->count;
    off_t at = c->now->offset;
    while (part < end) {
        int64_t some = end - part < IOV_MAX ? end - part : IOV_MAX;
        ssize_t written = pwritev(c->now->fd, part, (int)some, at);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        if (written == 0) return ENOSPC;
        at += written;
        while (part < end && (size_t)written >= part->iov_len) written -= (part++)->iov_len;
        if (part < end) {
            part->iov_base = (char *)part->iov_base + written;
            part->iov_len -= written;
        }
    }
    return 0;
}

static int sync_file(commit *now) {
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    int error = fdatasync(now->fd) ? errno : 0;
    clock_gettime(CLOCK_MONOTONIC, &after);
    now->sync_ns = (after.tv_sec - before.tv_sec) * 1000000000LL + after.tv_nsec - before.tv_nsec;
    return error;
}

static void *run(void *argument) {
    committer *c = argument;
    uint64_t one = 1;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        while (!c->begun && !c->ended) pthread_cond_wait(&c->change, &c->lock);
        int begun = c->begun;
        c->begun = 0;
        pthread_mutex_unlock(&c->lock);
        if (!begun) return NULL;
        commit *now = c->now;
        now->sync_ns = 0;
        now->error = write_parts(c);
        now->in_sync = !now->error && now->sync;
        if (now->in_sync) now->error = sync_file(now);
        c->count = 0;
        while (write(c->done_fd, &one, sizeof one) < 0 && errno == EINTR) {}
    }
}

void *atropos_committer_new(commit *now, int32_t done_fd) {
    committer *c = calloc(1, sizeof *c);
    if (c == NULL) return NULL;
    c->now = now;
    c->done_fd = done_fd;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->change, NULL);
    if (pthread_create(&c->thread, NULL, run, c)) {
        free(c);
        return NULL;
    }
    return c;
}

/* A record: its head and its payload, which may be empty. 0, or -1 when there is no memory. */
int32_t atropos_committer_add(committer *c, void *head, int64_t head_size, void *payload, int64_t payload_size) {
    if (c->count + 2 > c->room) {
        int64_t room = c->room ? 2 * c->room : 64;
        struct iovec *parts = realloc(c->parts, (size_t)room * sizeof *parts);
        if (parts == NULL) return -1;
        c->parts = parts;
        c->room = room;
    }
    c->parts[c->count++] = (struct iovec){head, (size_t)head_size};
    if (payload_size) c->parts[c->count++] = (struct iovec){payload, (size_t)payload_size};
    return 0;
}

static void tell(committer *c, int *what) {
    pthread_mutex_lock(&c->lock);
    *what = 1;
    pthread_cond_signal(&c->change);
    pthread_mutex_unlock(&c->lock);
}

void atropos_committer_begin(committer *c) { tell(c, &c->begun); }

/* Finish what was begun, then end the thread. */
void atropos_committer_end(committer *c) {
    tell(c, &c->ended);
    pthread_join(c->thread, NULL);
    free(c->parts);
    free(c);
}
