#include "options.h"

#include <cstdlib>
#include <string>

#include "cuda_check.h"

namespace flash {

const char* const USAGE =
    R"(dist_flash_attn: attention on one GPU and on N, their times and the difference of their results.

  --seq L        length of queries and keys (1024); need not divide by N
  --dim D        head dim, a multiple of 8 up to 128 (64)
  --gpus N       ranks (2)
  --heads H      (1)
  --batch B      (1)
  --causal       query i sees keys 0..i
  --dtype T      fp32 or bf16 (fp32)
  --warmup W     forwards before the clock starts (5)
  --iters I      forwards timed, of which the median is said (20)
  --transport T  nccl: one GPU per rank; copy: any number of ranks on the GPUs there are (nccl)
  --strategy S   ring: keys and values go round; queries: they are everywhere, results are gathered (ring)
  --check        compare with fp64 on the CPU (of long inputs, with a sample of the rows)
  --json         one JSON object instead of text
  --help         this
)";

namespace {

int integer(const std::string& flag, const std::string& text, int least, int most = 1 << 30) {
    char* end = nullptr;
    const long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || value < least || value > most)
        throw Refused(flag + ": expected an integer from " + std::to_string(least) + " to " +
                      (most == 1 << 30 ? "2^30" : std::to_string(most)) + "; got '" + text + "'.");
    return static_cast<int>(value);
}

template <typename Choice>
Choice choice(const std::string& flag, const std::string& text, const char* first_word, Choice first,
              const char* second_word, Choice second) {
    if (text == first_word) return first;
    if (text == second_word) return second;
    throw Refused(flag + ": expected " + first_word + " or " + second_word + "; got '" + text + "'.");
}

}  // namespace

Options parse_options(int count, char** arguments) {
    Options options;
    flash_attn_problem& problem = options.problem;
    for (int i = 1; i < count; ++i) {
        const std::string flag = arguments[i];
        const auto value = [&]() -> std::string {
            if (++i == count) throw Refused(flag + ": expected a value after it; got the end of the line.");
            return arguments[i];
        };
        if (flag == "--seq") problem.seq_q = problem.seq_k = integer(flag, value(), 1);
        else if (flag == "--dim") problem.dim = integer(flag, value(), 1);
        else if (flag == "--gpus") options.gpus = integer(flag, value(), 1, 64);
        else if (flag == "--heads") problem.heads = integer(flag, value(), 1);
        else if (flag == "--batch") problem.batch = integer(flag, value(), 1);
        else if (flag == "--causal") problem.causal = 1;
        else if (flag == "--dtype")
            problem.dtype = choice(flag, value(), "fp32", FLASH_ATTN_FP32, "bf16", FLASH_ATTN_BF16);
        else if (flag == "--warmup") options.warmup = integer(flag, value(), 0);
        else if (flag == "--iters") options.iters = integer(flag, value(), 1);
        else if (flag == "--transport")
            options.transport = choice(flag, value(), "nccl", FLASH_ATTN_NCCL, "copy", FLASH_ATTN_COPY);
        else if (flag == "--strategy")
            options.strategy = choice(flag, value(), "ring", FLASH_ATTN_RING, "queries", FLASH_ATTN_QUERIES);
        else if (flag == "--check") options.check = true;
        else if (flag == "--json") options.json = true;
        else if (flag == "--help" || flag == "-h") options.help = true;
        else throw Refused(flag + ": no such flag; --help lists them.");
    }
    return options;
}

}  // namespace flash
