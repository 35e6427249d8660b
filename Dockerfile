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
RUN mkdir src && echo 'fn main() {}' > src/main.rs && touch src/lib.rs && cargo build --release --locked && rm -r src
COPY branchfs/src src
RUN touch src/main.rs src/lib.rs && cargo build --release --locked

# An environment without pip: system pip fills it from outside, and ten megabytes stay behind.
WORKDIR /build
COPY docker/requirements.txt .
RUN python3 -m venv --without-pip /opt/branching && \
    pip --python /opt/branching/bin/python install --no-cache-dir --no-compile --require-hashes -r requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY branching branching
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --no-index -w dist . && \
    pip --python /opt/branching/bin/python install --no-deps --no-index dist/*.whl && \
    /opt/branching/bin/python -m compileall -q /opt/branching/lib
# What an older build left behind is found by these two labels; the newest of this stage is the classic builder's cache.
LABEL branching.stage="build"

FROM ${BASE_IMAGE}
# make because the documented line runs it; tini because without an init signals hang and killed commands report success.
RUN apt-get update && apt-get install -y --no-install-recommends bash git make python3 tini && \
    apt-get clean && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/dpkg.log
COPY --from=build /build/branchfs/target/release/branchfs /usr/local/bin/
COPY --from=build /opt/branching /opt/branching
COPY docker/entrypoint /usr/local/bin/branching-entrypoint
COPY docker/enter /usr/local/bin/branching-enter
COPY docker/probe /usr/local/bin/branching-probe
RUN ln -s /opt/branching/bin/branching /usr/local/bin/branching && mkdir /src /workspace

# git refuses a repository of another owner, which is what --root would meet in a user's directory.
ENV LANG=C.UTF-8 GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=*
LABEL branching.stage="image" \
      org.opencontainers.image.title="branching" \
      org.opencontainers.image.description="Fork, explore, commit: speculative branches of a directory" \
      org.opencontainers.image.version="0.2.0" \
      org.opencontainers.image.licenses="Apache-2.0"
ENTRYPOINT ["tini", "-g", "-s", "--", "branching-entrypoint"]
