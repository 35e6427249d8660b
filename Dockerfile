# The image: BranchFS and the `branching` command, ready to branch the directory mounted at /src.
#
#     docker build -t branching .
#     docker run --rm --device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor:unconfined -v "$(pwd)":/src branching run -- make test
#
# Kept to what the classic builder understands, so that it builds with and without BuildKit. Where no registry answers:
#     docker build -t branching --build-arg BASE_IMAGE="$(scripts/base-image)" .

ARG BASE_IMAGE=debian:trixie-slim

FROM ${BASE_IMAGE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
        ca-certificates cargo gcc libc6-dev python3-hatchling python3-pip python3-venv rustc

# First the dependencies, behind an empty program: they stay cached while only our own sources change.
WORKDIR /build/branchfs
COPY branchfs/Cargo.toml branchfs/Cargo.lock ./
COPY branchfs/crates/core/Cargo.toml crates/core/
COPY branchfs/crates/fuse/Cargo.toml crates/fuse/
COPY branchfs/crates/sandbox/Cargo.toml crates/sandbox/
RUN for crate in . crates/*; do mkdir "$crate/src" && touch "$crate/src/lib.rs"; done && \
    echo 'fn main() {}' > src/main.rs && cargo build --release --locked && rm -r src crates/*/src
COPY branchfs/src src
COPY branchfs/crates crates
RUN touch src/main.rs src/lib.rs crates/*/src/lib.rs && cargo build --release --locked

# An environment without pip: system pip fills it from outside, and ten megabytes stay behind.
WORKDIR /build
COPY docker/requirements.txt .
RUN python3 -m venv --without-pip /opt/branching && \
    pip --python /opt/branching/bin/python install --no-cache-dir --no-compile --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY branching branching
COPY skills skills
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index -w dist . && \
    pip --python /opt/branching/bin/python install --no-compile --no-deps --no-index dist/*.whl
COPY docker/entrypoint docker/exec-command docker/probe programs/
# All that is ours as it will lie in the image, in one directory and of one time: the same sources give the same layer.
# Compiled modules must not look at the time of their source, then; what pip compiled for itself does (-f).
# git refuses a repository of another owner, such as --root meets: in a file, as a command may set git's variables itself.
ARG SOURCE_DATE_EPOCH=1767225600
RUN /opt/branching/bin/python -m compileall -q -f --invalidation-mode unchecked-hash /opt/branching/lib && \
    mkdir -p /image/etc /image/usr/local/bin /image/opt /image/src /image/store /image/workspace && \
    printf '[safe]\n\tdirectory = *\n' >/image/etc/gitconfig && \
    install branchfs/target/release/branchfs /image/usr/local/bin && \
    for name in entrypoint exec-command probe; do install "programs/$name" "/image/usr/local/bin/branching-$name"; done && \
    ln -s /opt/branching/bin/branching /image/usr/local/bin/branching && \
    cp -a /opt/branching /image/opt && \
    find /image -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
# By these labels a later build of that name finds this stage; the newest is the classic builder's cache.
ARG BRANCHING_NAME=branching
LABEL branching.stage="build" branching.name="${BRANCHING_NAME}"

FROM ${BASE_IMAGE}
ARG SOURCE_DATE_EPOCH=1767225600
# make because the documented line runs it; tini because without an init signals hang and killed commands report success.
# What the installation writes itself, beside the packages' own files, has the time of the clock: that goes, too. Emptied,
# not removed, where the base has it: the mark of a removal has a time that nobody can set.
RUN touch /begun && apt-get update && apt-get install -y --no-install-recommends bash git less make python3 tini && \
    apt-get clean && find /var/cache/apt /var/lib/apt/lists -type f -size +0 -delete && \
    find /var/log /var/cache/ldconfig -type f -newer /begun -exec truncate --size=0 {} + && \
    find / -xdev -newer /begun -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} + && rm /begun
COPY --from=build /image /

ARG BRANCHING_NAME=branching
ENV LANG=C.UTF-8
LABEL branching.stage="image" \
      branching.name="${BRANCHING_NAME}" \
      org.opencontainers.image.title="branching" \
      org.opencontainers.image.description="Fork, explore, commit: speculative branches of a directory" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["tini", "-g", "-s", "--", "branching-entrypoint"]
