/* Exact attention forward on one GPU or many: softmax(scale * Q K^T) V without the matrix of scores.
 *
 * Tensors are contiguous, [batch, seq, heads, dim], their addresses multiples of 16 bytes. `dim` is a multiple of 8 up
 * to 128. With `causal` the last query meets the last key: query i sees key j where j <= i + seq_k - seq_q. A query
 * that sees no key has output 0 and lse -inf.
 *
 * A NaN in a query, or in a key it sees, makes its output and lse NaN; so may scores beyond 10^9.
 *
 * Functions that can fail return a status; `flash_attn_last_error` says in words what happened last on this thread.
 * NULL is refused, but for what is said to be optional.
 */
#ifndef FLASH_ATTN_H
#define FLASH_ATTN_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    FLASH_ATTN_OK = 0,
    FLASH_ATTN_REFUSED = 1, /* the arguments are wrong, or this GPU cannot; nothing was done */
    FLASH_ATTN_FAILED = 2   /* CUDA, NCCL or the host failed on the way */
} flash_attn_status;

typedef enum {
    FLASH_ATTN_FP32 = 0, /* fp32 throughout: src/flash_fp32.cu */
    FLASH_ATTN_BF16 = 1  /* bf16 in and out, fp32 sums, tensor cores: src/flash_bf16.cu */
} flash_attn_dtype;

typedef struct {
    int batch, heads, seq_q, seq_k, dim;
    int causal;
    float scale; /* 0: 1 / sqrt(dim) */
    flash_attn_dtype dtype;
} flash_attn_problem;

const char *flash_attn_last_error(void);

/* One GPU, the current one. `q`, `k`, `v` and `out` lie on it; `lse` [batch, heads, seq_q] is the natural logarithm of
 * each row's sum of exponentials, or NULL. `stream` is a cudaStream_t, NULL the default one. Does not wait. */
flash_attn_status flash_attn_forward(const flash_attn_problem *problem, const void *q, const void *k, const void *v,
                                     void *out, float *lse, void *stream);

/* Many GPUs of one machine, one host thread each. */
typedef enum {
    FLASH_ATTN_RING = 0,    /* queries and keys sharded by sequence, keys and values rotate: src/ring.cpp */
    FLASH_ATTN_QUERIES = 1  /* queries sharded, keys and values everywhere, results gathered: src/query_split.cpp */
} flash_attn_strategy;

typedef enum {
    FLASH_ATTN_NCCL = 0, /* one rank per GPU */
    FLASH_ATTN_COPY = 1  /* any number of ranks on the GPUs there are, cudaMemcpyAsync between them */
} flash_attn_transport;

typedef struct flash_attn_group flash_attn_group; /* ranks with their threads, streams, buffers and communicator */

flash_attn_status flash_attn_group_create(const flash_attn_problem *problem, int ranks, flash_attn_strategy strategy,
                                          flash_attn_transport transport, flash_attn_group **group);

/* After FAILED a group can only be destroyed: its ranks no longer agree. All else is then refused.
 *
 * Shards the whole tensors onto the ranks, and waits; they are on the host or on any GPU. It copies on the default
 * stream of the current GPU: what makes the tensors has ended, or is in that stream. */
flash_attn_status flash_attn_group_load(flash_attn_group *group, const void *q, const void *k, const void *v);

/* Computes and waits. Inputs stay as loaded, so it can be called again. `milliseconds` (or NULL) is the time between
 * the first work and the last on the GPU that took longest; allocation and the communicator's set-up lie outside it. */
flash_attn_status flash_attn_group_forward(flash_attn_group *group, float *milliseconds);

/* The whole result, to the host or to any GPU, on the default stream of the current GPU; waits. */
flash_attn_status flash_attn_group_store(flash_attn_group *group, void *out);

/* Device memory that the group holds on the GPU where it holds most; 0 for NULL. */
size_t flash_attn_group_bytes_per_gpu(const flash_attn_group *group);

void flash_attn_group_destroy(flash_attn_group *group); /* NULL: nothing to do */

/* How a ring divides its work. Plain arithmetic: needs no GPU. */
typedef struct {
    int start, length;
} flash_attn_range;

typedef struct {
    int shard;             /* whose keys and values the rank holds in this step */
    flash_attn_range keys; /* the positions they have in the whole sequence */
    int offset;            /* with causal, local query i sees local key j where j <= i + offset */
    int computes;          /* 0: nothing here is visible, the shard is only passed on */
    int first, last;       /* of the steps that compute: start from the empty state; write the output */
} flash_attn_ring_step;

/* Balanced: lengths differ by at most one, the longer shards come first. A rank that is not there has an empty one. */
flash_attn_range flash_attn_shard(int total, int ranks, int rank);
/* A rank or step that is not there, from 0 to ranks - 1, has shard -1 and computes nothing. */
flash_attn_ring_step flash_attn_schedule(const flash_attn_problem *problem, int ranks, int rank, int step);

/* The definition, in fp64 on the host, of every query i with i % every == 0; the other rows of `out` stay as they
 * are. */
flash_attn_status flash_attn_reference(const flash_attn_problem *problem, const void *q, const void *k, const void *v,
                                       int every, double *out);

#ifdef __cplusplus
}
#endif

#endif
