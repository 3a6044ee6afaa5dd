// dist_flash_attn: random Q, K, V; one GPU against N ranks; times, memory and the largest difference.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "cuda_check.h"
#include "options.h"
#include "problem.h"

namespace {

using flash::Options;
using flash::Refused;

// A tensor on the host in the problem's dtype.
struct Tensor {
    Tensor(size_t count, flash_attn_dtype dtype) : dtype(dtype), data(count * (dtype == FLASH_ATTN_BF16 ? 2 : 4)) {}

    size_t count() const { return data.size() / (dtype == FLASH_ATTN_BF16 ? 2 : 4); }

    float get(size_t index) const {
        std::uint32_t bits = 0;
        if (dtype == FLASH_ATTN_BF16) {
            std::uint16_t half;
            std::memcpy(&half, &data[2 * index], 2);
            bits = static_cast<std::uint32_t>(half) << 16;
        } else {
            std::memcpy(&bits, &data[4 * index], 4);
        }
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    void set(size_t index, float value) {
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (dtype == FLASH_ATTN_FP32) {
            std::memcpy(&data[4 * index], &bits, 4);
        } else {
            const auto half = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest even
            std::memcpy(&data[2 * index], &half, 2);
        }
    }

    flash_attn_dtype dtype;
    std::vector<unsigned char> data;
};

// Uniform in [-1, 1), the same on every machine: a counter, mixed.
void fill_random(Tensor& tensor, std::uint64_t seed) {
    for (size_t i = 0; i < tensor.count(); ++i) {
        std::uint64_t x = (seed << 40) + i;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
        x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
        tensor.set(i, static_cast<float>((x ^ x >> 31) >> 40) * (2.0f / (1 << 24)) - 1.0f);
    }
}

struct DeviceTensor {
    explicit DeviceTensor(size_t count) : bytes(count) { CUDA_CHECK(cudaMalloc(&data, bytes)); }
    explicit DeviceTensor(const Tensor& from) : DeviceTensor(from.data.size()) {
        CUDA_CHECK(cudaMemcpy(data, from.data.data(), bytes, cudaMemcpyHostToDevice));
    }
    ~DeviceTensor() { cudaFree(data); }
    DeviceTensor(const DeviceTensor&) = delete;
    DeviceTensor& operator=(const DeviceTensor&) = delete;

    void* data = nullptr;
    size_t bytes;
};

void succeed(flash_attn_status status) {
    if (status == FLASH_ATTN_REFUSED) throw Refused(flash_attn_last_error());
    if (status == FLASH_ATTN_FAILED) throw std::runtime_error(flash_attn_last_error());
}

template <typename Forward>
double median_ms(const Options& options, Forward&& forward) {
    std::vector<float> times;
    for (int i = 0; i < options.warmup + options.iters; ++i) {
        const float milliseconds = forward();
        if (i >= options.warmup) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    return (times[times.size() / 2] + times[(times.size() - 1) / 2]) / 2.0;
}

struct Figures {
    double single_ms, multi_ms, difference, tflop;
    size_t single_bytes, bytes_per_gpu;
    int checked_every = 0;  // 0: not checked
    double single_error = 0.0, multi_error = 0.0;
};

void run_single(const Options& options, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out,
                Figures& figures) {
    CUDA_CHECK(cudaSetDevice(0));
    const DeviceTensor device_q(q), device_k(k), device_v(v), device_out(out.data.size());
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    figures.single_ms = median_ms(options, [&] {
        CUDA_CHECK(cudaEventRecord(start));
        succeed(flash_attn_forward(&options.problem, device_q.data, device_k.data, device_v.data, device_out.data,
                                   nullptr, nullptr));
        CUDA_CHECK(cudaEventRecord(stop));
        CUDA_CHECK(cudaEventSynchronize(stop));
        float milliseconds;
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, stop));
        return milliseconds;
    });
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaMemcpy(out.data.data(), device_out.data, out.data.size(), cudaMemcpyDeviceToHost));
    figures.single_bytes = device_q.bytes + device_k.bytes + device_v.bytes + device_out.bytes;
}

void run_multi(const Options& options, const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out,
               Figures& figures) {
    flash_attn_group* group = nullptr;
    succeed(flash_attn_group_create(&options.problem, options.gpus, options.strategy, options.transport, &group));
    struct Owner {
        flash_attn_group* group;
        ~Owner() { flash_attn_group_destroy(group); }
    } owner{group};
    succeed(flash_attn_group_load(group, q.data.data(), k.data.data(), v.data.data()));
    figures.multi_ms = median_ms(options, [&] {
        float milliseconds;
        succeed(flash_attn_group_forward(group, &milliseconds));
        return milliseconds;
    });
    succeed(flash_attn_group_store(group, out.data.data()));
    figures.bytes_per_gpu = flash_attn_group_bytes_per_gpu(group);
}

// NaN stays NaN: it must not look like a small difference.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

void check_against_cpu(const Options& options, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& single,
                       const Tensor& multi, Figures& figures) {
    const flash_attn_problem& p = options.problem;
    const double products = 2.0 * p.batch * p.heads * p.dim * p.seq_q * p.seq_k;
    const int every = static_cast<int>(std::min<double>(p.seq_q, std::ceil(products / 4e9)));
    std::vector<double> exact(single.count());
    succeed(flash_attn_reference(&p, q.data.data(), k.data.data(), v.data.data(), every, exact.data()));
    const size_t row = static_cast<size_t>(p.heads) * p.dim;
    for (size_t i = 0; i < exact.size(); ++i) {
        if (i / row % p.seq_q % every != 0) continue;
        figures.single_error = larger(std::abs(single.get(i) - exact[i]), figures.single_error);
        figures.multi_error = larger(std::abs(multi.get(i) - exact[i]), figures.multi_error);
    }
    figures.checked_every = every;
}

const char* transport_name(const Options& o) { return o.transport == FLASH_ATTN_NCCL ? "nccl" : "copy"; }
const char* strategy_name(const Options& o) { return o.strategy == FLASH_ATTN_RING ? "ring" : "queries"; }
const char* dtype_name(const Options& o) { return o.problem.dtype == FLASH_ATTN_BF16 ? "bf16" : "fp32"; }

void print_text(const Options& o, const Figures& f, double limit) {
    const flash_attn_problem& p = o.problem;
    std::printf("batch %d, heads %d, seq %d, dim %d, %s%s; %s of %d, %s\n", p.batch, p.heads, p.seq_q, p.dim,
                dtype_name(o), p.causal ? ", causal" : "", strategy_name(o), o.gpus, transport_name(o));
    std::printf("single-GPU forward   %9.4f ms  %7.2f TFLOP/s\n", f.single_ms, f.tflop / f.single_ms * 1e3);
    std::printf("multi-GPU forward    %9.4f ms  %7.2f TFLOP/s\n", f.multi_ms, f.tflop / f.multi_ms * 1e3);
    std::printf("speed-up             %9.3f x\n", f.single_ms / f.multi_ms);
    std::printf("max |single - multi| %9.2e     (limit %.0e)\n", f.difference, limit);
    std::printf("memory per GPU       %9.2f MB  (single %.2f MB)\n", f.bytes_per_gpu / 1e6, f.single_bytes / 1e6);
    if (f.checked_every > 0)
        std::printf("max |single - fp64|  %9.2e     (multi %.2e, 1 row in %d)\n", f.single_error, f.multi_error,
                    f.checked_every);
}

// JSON has no NaN: such a number is null.
std::string json_number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return std::isfinite(value) ? text : "null";
}

void print_json(const Options& o, const Figures& f, double limit) {
    const flash_attn_problem& p = o.problem;
    std::printf("{\"batch\": %d, \"heads\": %d, \"seq\": %d, \"dim\": %d, \"dtype\": \"%s\", \"causal\": %s, "
                "\"gpus\": %d, \"strategy\": \"%s\", \"transport\": \"%s\", \"warmup\": %d, \"iters\": %d, ",
                p.batch, p.heads, p.seq_q, p.dim, dtype_name(o), p.causal ? "true" : "false", o.gpus, strategy_name(o),
                transport_name(o), o.warmup, o.iters);
    std::printf("\"single_ms\": %s, \"multi_ms\": %s, \"speedup\": %s, \"single_tflops\": %s, \"multi_tflops\": %s, ",
                json_number(f.single_ms).c_str(), json_number(f.multi_ms).c_str(),
                json_number(f.single_ms / f.multi_ms).c_str(), json_number(f.tflop / f.single_ms * 1e3).c_str(),
                json_number(f.tflop / f.multi_ms * 1e3).c_str());
    std::printf("\"max_abs_difference\": %s, \"limit\": %s, \"single_bytes\": %zu, \"bytes_per_gpu\": %zu, ",
                json_number(f.difference).c_str(), json_number(limit).c_str(), f.single_bytes, f.bytes_per_gpu);
    if (f.checked_every > 0)
        std::printf("\"check\": {\"every\": %d, \"single_error\": %s, \"multi_error\": %s}}\n", f.checked_every,
                    json_number(f.single_error).c_str(), json_number(f.multi_error).c_str());
    else
        std::printf("\"check\": null}\n");
}

int run(const Options& options) {
    const flash_attn_problem& p = options.problem;
    flash::check(&p);
    int present = 0;
    CUDA_CHECK(cudaGetDeviceCount(&present));
    if (options.transport == FLASH_ATTN_NCCL && options.gpus > present)
        throw Refused("--gpus: expected at most the " + std::to_string(present) + " here; got " +
                      std::to_string(options.gpus) + ". --transport copy runs that many ranks on the GPUs there are.");

    const size_t count = static_cast<size_t>(p.batch) * p.seq_q * p.heads * p.dim;
    Tensor q(count, p.dtype), k(count, p.dtype), v(count, p.dtype), single(count, p.dtype), multi(count, p.dtype);
    fill_random(q, 1), fill_random(k, 2), fill_random(v, 3);

    Figures figures{};
    const double pairs = p.causal ? 0.5 * p.seq_q * (p.seq_q + 1.0) : 1.0 * p.seq_q * p.seq_k;
    figures.tflop = 4e-12 * p.batch * p.heads * p.dim * pairs;
    run_single(options, q, k, v, single, figures);
    run_multi(options, q, k, v, multi, figures);
    for (size_t i = 0; i < count; ++i)
        figures.difference = larger(std::abs(static_cast<double>(single.get(i)) - multi.get(i)), figures.difference);
    if (options.check) check_against_cpu(options, q, k, v, single, multi, figures);

    // Values lie in [-1, 1]: fp32 sums in another order differ by 1e-6, a bf16 result near 1 by a rounding or two.
    const double limit = p.dtype == FLASH_ATTN_BF16 ? 1e-2 : 1e-5;
    options.json ? print_json(options, figures, limit) : print_text(options, figures, limit);
    const double worst = larger(figures.difference, larger(figures.single_error, figures.multi_error));
    return worst <= limit ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
    Options options;
    try {
        options = flash::parse_options(count, arguments);
        if (options.help) {
            std::printf("%s", flash::USAGE);
            return 0;
        }
        return run(options);
    } catch (const Refused& error) {
        std::fprintf(stderr, "dist_flash_attn: %s\n", error.what());
        return 2;
    } catch (const std::bad_alloc&) {
        const double bytes = 1.0 * options.problem.batch * options.problem.seq_q * flash::row_bytes(options.problem);
        std::fprintf(stderr,
                     "dist_flash_attn: out of memory on the host: Q, K, V and two results take %.3g GB there.\n",
                     5e-9 * bytes);
        return 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "dist_flash_attn: %s\n", error.what());
        return 1;
    }
}
