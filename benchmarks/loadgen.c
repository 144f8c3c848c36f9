/* A closed-loop HTTP/1.1 load generator: one thread, poll(), keep-alive, bodies read once from files.
 *
 *   loadgen PORT LIMIT_S  NAME METHOD PATH HEADERS BODY_FILE CONNS COUNT FLAGS  [next group of eight ...]
 *
 * Each group opens CONNS connections that send the same request again and again until COUNT replies came in all.
 * HEADERS: full header lines separated by '\n' ("" for none). BODY_FILE: "-" for none. FLAGS: any of
 *   m  the run ends when all groups with 'm' are done (groups without it run beside them)
 *   n  the group is done at the first reply shorter than 100 bytes (a drained queue says {"batch":null})
 *   i  the body contains "########################" once; every request writes its own number there (24 digits, other ones in every run)
 * For each group one JSON line goes to stdout: replies, status codes, seconds from first send to last reply, bytes
 * received, latencies (from the first byte sent to the last byte received) in milliseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MARK "########################"
#define SCRATCH (1 << 18)

typedef struct {
    const char *name;
    char *head;
    size_t head_len;
    char *body;
    size_t body_len;
    char *mark;
    long conns, target, sent, done, status[6];
    int is_main, until_short, finished;
    double first, last, *latency;
    long long bytes_in;
    char tail[201];
} Group;

typedef enum { IDLE, SENDING, HEADERS, BODY, CHUNK_SIZE, CHUNK_DATA, TRAILER } Phase;

typedef struct {
    Group *group;
    int fd;
    Phase phase;
    size_t sent, head_got, line_got;
    long long left, body_got;
    int status, close_after;
    double start;
    char *body; /* own copy when it is numbered */
    char head[8192], line[64];
    char shown[201];
} Conn;

static int port;
static char scratch[SCRATCH];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static int dial(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    return fd;
}

static void load_body(Group *group, const char *path) {
    group->body = NULL;
    group->body_len = 0;
    if (!strcmp(path, "-")) return;
    FILE *file = fopen(path, "rb");
    if (!file) die(path);
    fseek(file, 0, SEEK_END);
    group->body_len = ftell(file);
    rewind(file);
    group->body = malloc(group->body_len + 1);
    if (fread(group->body, 1, group->body_len, file) != group->body_len) die(path);
    fclose(file);
}

static Group make_group(char **argv) {
    Group group = {.name = argv[0], .conns = atol(argv[5]), .target = atol(argv[6])};
    load_body(&group, argv[4]);
    group.is_main = strchr(argv[7], 'm') != NULL;
    group.until_short = strchr(argv[7], 'n') != NULL;
    if (strchr(argv[7], 'i')) group.mark = memmem(group.body, group.body_len, MARK, strlen(MARK));
    if (strchr(argv[7], 'i') && !group.mark) {
        fprintf(stderr, "%s: no place for a number in the body\n", group.name);
        exit(1);
    }
    group.head = malloc(4096 + strlen(argv[3]) * 2);
    size_t n = sprintf(group.head, "%s %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n", argv[1], argv[2], port);
    for (const char *c = argv[3]; *c; c++) {
        if (*c == '\n') group.head[n++] = '\r';
        group.head[n++] = *c;
    }
    if (*argv[3]) n += sprintf(group.head + n, "\r\n");
    if (group.body_len || !strcmp(argv[1], "POST")) n += sprintf(group.head + n, "Content-Length: %zu\r\n", group.body_len);
    n += sprintf(group.head + n, "\r\n");
    group.head_len = n;
    group.latency = malloc(sizeof(double) * (group.target + 1));
    return group;
}

static void begin(Conn *conn) {
    Group *group = conn->group;
    if (group->finished || group->sent >= group->target) {
        conn->phase = IDLE;
        return;
    }
    if (group->mark) {
        char number[32];
        if (!conn->body) {
            conn->body = malloc(group->body_len);
            memcpy(conn->body, group->body, group->body_len);
        }
        snprintf(number, sizeof number, "%012ld%012ld", (long)getpid(), group->sent);
        memcpy(conn->body + (group->mark - group->body), number, 24);
    }
    group->sent++;
    conn->phase = SENDING;
    conn->sent = conn->head_got = 0;
    conn->body_got = 0;
    conn->start = now();
    if (!group->first) group->first = conn->start;
}

static void finish(Conn *conn) {
    Group *group = conn->group;
    double t = now();
    group->latency[group->done++] = t - conn->start;
    group->last = t;
    group->status[conn->status / 100 < 6 ? conn->status / 100 : 0]++;
    size_t shown = conn->body_got < 200 ? conn->body_got : 200;
    memcpy(group->tail, conn->shown, shown);
    group->tail[shown] = 0;
    if (group->done >= group->target || (group->until_short && conn->body_got < 100)) group->finished = 1;
    if (conn->close_after) {
        close(conn->fd);
        conn->fd = dial();
    }
    begin(conn);
}

static void show(Conn *conn, const char *data, size_t n) {
    long long at = conn->body_got;
    for (size_t i = 0; i < n && at + (long long)i < 200; i++) conn->shown[at + i] = data[i];
    conn->body_got += n;
}

static void do_send(Conn *conn) {
    Group *group = conn->group;
    char *body = conn->body ? conn->body : group->body;
    while (conn->sent < group->head_len + group->body_len) {
        struct iovec parts[2];
        int count = 0;
        if (conn->sent < group->head_len)
            parts[count++] = (struct iovec){group->head + conn->sent, group->head_len - conn->sent};
        size_t skip = conn->sent > group->head_len ? conn->sent - group->head_len : 0;
        if (group->body_len > skip) parts[count++] = (struct iovec){body + skip, group->body_len - skip};
        ssize_t n = writev(conn->fd, parts, count);
        if (n < 0) {
            if (errno == EAGAIN) return;
            die("write");
        }
        conn->sent += n;
    }
    conn->phase = HEADERS;
}

static void parse_head(Conn *conn) {
    char *value;
    conn->head[conn->head_got] = 0;
    conn->status = atoi(conn->head + 9);
    conn->left = 0;
    conn->close_after = strcasestr(conn->head, "\r\nconnection: close") != NULL;
    if ((value = strcasestr(conn->head, "\r\ncontent-length:"))) {
        conn->left = atoll(value + 17);
        conn->phase = BODY;
    } else if (strcasestr(conn->head, "\r\ntransfer-encoding: chunked")) {
        conn->phase = CHUNK_SIZE;
        conn->line_got = 0;
    } else
        conn->phase = BODY;
    if (conn->phase == BODY && conn->left == 0) finish(conn);
}

/* Feeds received bytes through the reply's state machine. */
static void feed(Conn *conn, const char *data, size_t n) {
    while (n && conn->phase != IDLE && conn->phase != SENDING) {
        if (conn->phase == HEADERS) {
            if (conn->head_got >= sizeof conn->head - 1) die("reply head too long");
            conn->head[conn->head_got++] = *data++;
            n--;
            if (conn->head_got >= 4 && !memcmp(conn->head + conn->head_got - 4, "\r\n\r\n", 4)) parse_head(conn);
        } else if (conn->phase == BODY || conn->phase == CHUNK_DATA) {
            size_t take = (long long)n < conn->left ? n : (size_t)conn->left;
            show(conn, data, take);
            data += take;
            n -= take;
            conn->left -= take;
            if (!conn->left && conn->phase == BODY) finish(conn);
            else if (!conn->left) conn->phase = CHUNK_SIZE, conn->line_got = 0;
        } else { /* CHUNK_SIZE, TRAILER: one line at a time; the empty line after a chunk's data is skipped */
            char c = *data++;
            n--;
            if (c != '\n') {
                if (c != '\r' && conn->line_got < sizeof conn->line - 1) conn->line[conn->line_got++] = c;
                continue;
            }
            conn->line[conn->line_got] = 0;
            if (conn->phase == TRAILER) {
                if (!conn->line_got) finish(conn);
            } else if (conn->line_got) {
                conn->left = strtoll(conn->line, NULL, 16);
                conn->phase = conn->left ? CHUNK_DATA : TRAILER;
            }
            conn->line_got = 0;
        }
    }
}

static void do_recv(Conn *conn) {
    for (;;) {
        ssize_t n = read(conn->fd, scratch, SCRATCH);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            if (conn->phase == IDLE) { close(conn->fd); conn->fd = -1; return; }
            die("server closed the connection");
        }
        conn->group->bytes_in += n;
        feed(conn, scratch, n);
        if (conn->phase == IDLE || conn->phase == SENDING) return;
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(Group *group) {
    long n = group->done;
    qsort(group->latency, n, sizeof(double), ascending);
    double sum = 0;
    for (long i = 0; i < n; i++) sum += group->latency[i];
#define AT(q) (n ? 1e3 * group->latency[(long)((n - 1) * (q) + 0.5)] : 0.0)
    printf("{\"name\":\"%s\",\"replies\":%ld,\"ok\":%ld,\"seconds\":%.6f,\"bytes_in\":%lld,\"mean_ms\":%.4f,"
           "\"p50_ms\":%.4f,\"p99_ms\":%.4f,\"max_ms\":%.4f,\"last_reply\":\"",
           group->name, n, group->status[2], n ? group->last - group->first : 0.0, group->bytes_in,
           n ? 1e3 * sum / n : 0.0, AT(0.5), AT(0.99), AT(1.0));
    for (char *c = group->tail; *c; c++) {
        if (*c == '"' || *c == '\\') putchar('\\');
        putchar((unsigned char)*c < 32 || (unsigned char)*c > 126 ? '?' : *c);
    }
    printf("\"}\n");
}

int main(int argc, char **argv) {
    if (argc < 11 || (argc - 3) % 8) {
        fprintf(stderr, "usage: loadgen PORT LIMIT_S (NAME METHOD PATH HEADERS BODY_FILE CONNS COUNT FLAGS)...\n");
        return 2;
    }
    port = atoi(argv[1]);
    double deadline = now() + atof(argv[2]);
    int num_groups = (argc - 3) / 8, total = 0;
    Group *groups = calloc(num_groups, sizeof *groups);
    for (int g = 0; g < num_groups; g++) {
        groups[g] = make_group(argv + 3 + 8 * g);
        total += groups[g].conns;
    }
    Conn *conns = calloc(total, sizeof *conns);
    struct pollfd *polls = calloc(total, sizeof *polls);
    for (int g = 0, c = 0; g < num_groups; g++)
        for (long i = 0; i < groups[g].conns; i++, c++) {
            conns[c].group = &groups[g];
            conns[c].fd = dial();
        }
    for (int c = 0; c < total; c++) begin(&conns[c]);
    for (;;) {
        int open_main = 0;
        for (int g = 0; g < num_groups; g++) open_main |= groups[g].is_main && !groups[g].finished;
        int busy = 0;
        for (int c = 0; c < total; c++) busy |= conns[c].phase != IDLE;
        if ((!open_main && !busy) || now() > deadline) break;
        if (!open_main) /* what is under way beside the measured groups still counts, nothing new begins */
            for (int g = 0; g < num_groups; g++) groups[g].finished = 1;
        for (int c = 0; c < total; c++) {
            polls[c].fd = conns[c].phase == IDLE ? -1 : conns[c].fd;
            polls[c].events = conns[c].phase == SENDING ? POLLOUT | POLLIN : POLLIN;
        }
        if (poll(polls, total, 1000) < 0) die("poll");
        for (int c = 0; c < total; c++) {
            if (conns[c].phase == IDLE || !polls[c].revents) continue;
            if (conns[c].phase == SENDING && (polls[c].revents & POLLOUT)) do_send(&conns[c]);
            else if (conns[c].phase == SENDING) conns[c].phase = HEADERS, do_recv(&conns[c]); /* an early refusal */
            if (conns[c].phase > SENDING && (polls[c].revents & (POLLIN | POLLHUP))) do_recv(&conns[c]);
        }
    }
    for (int g = 0; g < num_groups; g++) report(&groups[g]);
    return 0;
}
