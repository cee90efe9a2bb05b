#!/bin/sh
# What `make` installs:
#   install.sh system PYTHON             shared libraries that Mooncake needs, where we may install them
#   install.sh environment PYTHON VENV   the virtual environment with the extras cpu, hf and dev
set -eu

# Prints the Debian packages of those libraries that the loader does not find.
missing_packages() {
    "$1" - <<'END'
import ctypes

PACKAGES = {"libcurl.so.4": "libcurl4", "libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1"}
for library, package in PACKAGES.items():
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package, end=" ")
END
}

install_system() {
    packages=$(missing_packages "$1")
    [ -n "$packages" ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "Mooncake needs ${packages% }, and only root can install them (apt-get install ${packages% }): using shared memory (shm) instead."
        return 0
    fi
    # $packages is a list of words.
    # shellcheck disable=SC2086
    if ! { apt_get update && apt_get install --no-install-recommends $packages; }; then
        echo "${packages% } could not be installed: using shared memory (shm) instead of Mooncake."
    fi
}

apt_get() {
    DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" </dev/null >&2
}

install_environment() {
    python=$1 venv=$2
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "epd needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Name another: make PYTHON=python3.12" >&2
        exit 1
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        echo "$python cannot make virtual environments: apt-get install python3-venv" >&2
        exit 1
    fi
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        -c constraints.txt -e '.[cpu,hf,dev]'
}

cd "$(dirname "$0")/.."
case "${1-}" in
    system) install_system "$2" ;;
    environment) install_environment "$2" "$3" ;;
    *)
        sed -n '2,4s/^# *//p' "$0" >&2
        exit 2
        ;;
esac
