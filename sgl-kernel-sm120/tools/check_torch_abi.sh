#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compile csrc/torch_abi.h together with the headers of the torch that $PYTHON has: a different signature is an error.
set -e
cd "$(dirname "$0")/.."
include=$("${PYTHON:-python3}" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')
cat <<'CODE' | "${CXX:-g++}" -std=c++17 -fsyntax-only -Icsrc -isystem "$include" -x c++ -
#define USE_CUDA 1
#include "torch_abi.h"
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
int main() {}
CODE
echo "csrc/torch_abi.h agrees with $include"
