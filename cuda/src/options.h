// The command line of dist_flash_attn.
#pragma once

#include "flash_attn.h"

namespace flash {

struct Options {
    flash_attn_problem problem{1, 1, 1024, 1024, 64, 0, 0.0f, FLASH_ATTN_FP32};
    int gpus = 2, warmup = 5, iters = 20;
    flash_attn_strategy strategy = FLASH_ATTN_RING;
    flash_attn_transport transport = FLASH_ATTN_NCCL;
    bool check = false, json = false, help = false;
};

extern const char* const USAGE;

Options parse_options(int count, char** arguments);  // throws Refused, naming the flag

}  // namespace flash
