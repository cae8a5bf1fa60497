# What the tests need of a machine besides `make install`, and the workers that run them. Sourced.

# The walls of the sandbox, a Slurm of one machine, a browser and OpenSSL: without them tests would be skipped.
packages=()
command -v bwrap >/dev/null || packages+=(bubblewrap libseccomp2)
command -v slurmctld >/dev/null || packages+=(slurm-wlm munge)
command -v chromium >/dev/null || packages+=(chromium)
command -v openssl >/dev/null || packages+=(openssl)
if ((${#packages[@]})); then
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null
fi

# Of hundreds of processes that tests start each would compile our sources anew.
unset PYTHONDONTWRITEBYTECODE

# Workers of pytest-xdist: one for each core, and one for tests that wait. Where the system has another Python of the
# same minor version, a worker with that Python runs the tests that start no actors, on the packages of .venv.
workers() {
    local system=/usr/bin/python3.11 ours=.venv/bin/python other=.venv/other
    version() { "$1" -c 'import sys; print(sys.version_info)'; }
    local specs=() core
    for ((core = 1; core < $(nproc); core++)); do specs+=(--tx popen); done
    if [ -x "$system" ] && ((${#specs[@]})) && [ "$(version "$system")" != "$(version "$ours")" ]; then
        "$system" -m venv --without-pip "$other"
        "$ours" -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
            >"$other/lib/python3.11/site-packages/those_of_venv.pth"
        sed "1s|.*|#!$PWD/$other/bin/python|" .venv/bin/titan-rl >"$other/bin/titan-rl"
        chmod +x "$other/bin/titan-rl"
        specs+=(--tx "popen//python=$PWD/$other/bin/python")
    else
        specs+=(--tx popen)
    fi
    echo "${specs[@]} --tx popen"
}
