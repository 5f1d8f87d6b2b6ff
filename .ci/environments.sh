# What .ci/run and .ci/nightly share: the environments with the oldest and with the newest JAX. Source it in the root.

# The first of some versions of Python that is there and runs, python3 if none is: on PATH, or installed by pyenv.
python_of() {
  local version python
  for version in "$@"; do
    while read -r python; do
      if "$python" -c 'import ssl, venv' 2>/dev/null; then echo "$python"; return; fi
    done < <(type -ap "python$version"; compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version.*/bin/python$version")
  done
  command -v python3
}

oldest_python=$(python_of 3.11)
newest_python=$(python_of 3.14 3.13 3.12)

# With these XLA compiles for CPUs in less than half the time, to slower programs. Newer ones do not know the second.
sooner="JAX_DISABLE_MOST_OPTIMIZATIONS=1 XLA_FLAGS=--xla_cpu_use_fusion_emitters=false"
newest_sooner="JAX_DISABLE_MOST_OPTIMIZATIONS=1"

# make in one of the two environments.
oldest() { make VENV=.venv-oldest PYTHON="$oldest_python" CONSTRAINTS=.ci/oldest.txt "$@"; }
newest() { make VENV=.venv-newest PYTHON="$newest_python" "$@"; }

# say PASS ENVIRONMENT
say() { echo "=== $1: $(".venv-$2/bin/llmjax" version | paste -sd ';' | sed 's/;/, /g')"; }

# Where some packages are in one index and some in another, pip warns of each that is not in the first: hundreds of lines.
export PIP_QUIET=2  # errors only
