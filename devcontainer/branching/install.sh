#!/bin/sh
# Installs `branching` and `branchfs` from the wheels beside this file, in /usr/local or in the directory given.
# The build of a dev container runs it as root; EXTRAS is the option of the feature.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix=${1:-/usr/local}
extras=${EXTRAS-cli,mcp}

fail() { echo "branching: $1" >&2; echo "Hint: $2" >&2; exit 1; }

wheel() {
    for found in "$here/$1"-*.whl; do
        [ -f "$found" ] || fail "there is no wheel of $1 in $here." "pip wheel --no-deps -w $here . ./branchfs, in the source tree"
        echo "$found"
        return
    done
}
library=$(wheel branching_workspaces)
program=$(wheel branchfs)

has_requirements() {
    command -v fusermount3 >/dev/null && python3 -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}
if ! has_requirements; then
    command -v apt-get >/dev/null || fail "Python 3.10 with venv, or fusermount3, is missing." "install them before this feature"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends fuse3 python3-venv >/dev/null
    has_requirements || fail "$(python3 --version) is too old." "use an image with Python 3.10 or newer"
fi

python3 -m venv "$prefix/lib/branching"
"$prefix/lib/branching/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "$library${extras:+[$extras]}" "$program"
mkdir -p "$prefix/bin" "$prefix/share/branching"
ln -sf "$prefix/lib/branching/bin/branching" "$prefix/lib/branching/bin/branchfs" "$prefix/bin"

# The entry point of the feature, which a dev container runs when it starts.
cat >"$prefix/share/branching/start" <<'END'
#!/bin/sh
# Lets ordinary users open /dev/fuse, as most systems do. The engine gives it the mode that it has on the host.
[ "$(id -u)" != 0 ] || [ ! -c /dev/fuse ] || chmod a+rw /dev/fuse
exec "$@"
END
chmod 755 "$prefix/share/branching/start"
