//! Real programs in a branch.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;

use common::{Mount, assert_same, shell, snapshot};

#[test]
fn git_works_and_its_repository_is_whole_after_the_commit() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "git init -q . && git config user.email t@example.org && git config user.name t && echo 1 > f && git add . && git commit -qm one",
        );
    });
    let branch = mount.create("branch");
    shell(
        &branch,
        "test -z \"$(git status --porcelain)\"; git switch -qc topic; echo 2 > f; mkdir d; echo 3 > d/g; git add .; git commit -qm two
         git clone -q . copy; test \"$(git -C copy rev-parse HEAD)\" = \"$(git rev-parse HEAD)\"; rm -rf copy
         git gc -q; git fsck --strict; git stash list",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
    shell(
        &mount.base(),
        "git fsck --strict; test \"$(git log --oneline topic | wc -l)\" = 2; test -z \"$(git status --porcelain)\"",
    );
}

#[test]
fn a_database_works() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "python3 -c \"import sqlite3; c=sqlite3.connect('db'); c.execute('create table t(a)'); c.commit()\"",
        );
    });
    let branch = mount.create("branch");
    shell(
        &branch,
        "python3 - <<'END'
import sqlite3
for mode in ('delete', 'wal'):
    connection = sqlite3.connect('db')
    assert connection.execute(f'pragma journal_mode={mode}').fetchone() == (mode,)
    for i in range(200):
        connection.execute('insert into t values (?)', (i,))
        connection.commit()
    connection.execute('vacuum')
    assert connection.execute('pragma integrity_check').fetchone() == ('ok',)
    connection.close()
END",
    );
    mount.commit("branch");
    shell(
        &mount.base(),
        "python3 -c \"import sqlite3; assert sqlite3.connect('db').execute('select count(*) from t').fetchone() == (400,)\"",
    );
}

#[test]
fn cargo_builds_and_runs() {
    let mount = Mount::over(|base| shell(base, "cargo init -q --vcs none --name probe ."));
    let branch = mount.create("branch");
    shell(
        &branch,
        "env -u CARGO_TARGET_DIR cargo run -q --offline | grep -q 'Hello'; env -u CARGO_TARGET_DIR cargo build -q --offline",
    );
    mount.commit("branch");
    shell(&mount.base(), "./target/debug/probe | grep -q Hello");
}

#[test]
fn a_virtual_environment_can_be_made() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    shell(
        &branch,
        "python3 -m venv env; env/bin/python -m pip --version; env/bin/python -m pip list -q",
    );
}

#[test]
fn shells_tools_and_temporary_files_work() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir d; for i in $(seq 50); do echo $i > d/$i; done; ln -s d/1 link; echo old > f",
        )
    });
    let branch = mount.create("branch");
    shell(
        &branch,
        "sed -i s/1/one/ d/1; cp -a d e; mv e/2 e/two; rm f; echo new > f; tar cf t.tar d; tar xf t.tar -C e; find . -name 3 -delete
         ln d/4 d/four; test d/4 -ef d/four; ln -sf d/5 link; mkfifo p; truncate -s 1M sparse; test $(stat -c %b sparse) = 0
         echo data | dd of=sparse bs=1 seek=500000 conv=notrunc status=none; chmod 640 d/6; touch -d 2001-02-03 d/7; (exec 9>lock; flock 9)
         rm -rf d/8; mkdir d/8; rmdir d/8; python3 -c 'import tempfile; tempfile.TemporaryFile(dir=\".\").write(b\"x\")'",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
}

#[test]
fn git_worktrees_branches_and_repacking_work() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "git init -q -b trunk repository; cd repository; git config user.email t@example.org; git config user.name t
             for i in $(seq 40); do echo $i > f$i; git add .; git commit -qm $i; done",
        );
    });
    let branch = mount.create("branch");
    shell(
        &branch,
        "cd repository; git worktree add -q ../tree -b side HEAD~5; cd ../tree; echo side > side; git add .; git commit -qm side
         cd ../repository; git merge -q -m merged side; git rebase -q HEAD~2; git stash list; echo dirty > f1; git stash -q; git stash pop -q; git checkout -q f1
         git repack -adq; git prune; git gc -q --aggressive; git worktree remove ../tree; git fsck --strict --no-dangling; git status --porcelain | wc -l | grep -qx 0
         git clone -q --bare . ../bare.git; git clone -q --reference . ../bare.git ../cloned; git -C ../cloned log --oneline | wc -l | grep -qx 41",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
    shell(
        &mount.base(),
        "git -C repository fsck --strict --no-dangling; test -e cloned/side; git -C cloned status --porcelain | wc -l | grep -qx 0",
    );
}

#[test]
fn a_tree_of_packages_is_installed_linked_and_replaced() {
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir -p node_modules/old/lib; seq 20 | xargs -I{} sh -c 'echo {} > node_modules/old/lib/{}.js'; echo '{}' > package.json",
        );
    });
    let branch = mount.create("branch");
    // As package managers do it: unpacked beside, renamed into place, linked from one store, links to programs.
    shell(
        &branch,
        "mkdir -p .store
         for package in $(seq 60); do
             mkdir -p .store/$package/lib; for file in $(seq 20); do echo $package $file > .store/$package/lib/$file.js; done
             echo '#!/bin/sh' > .store/$package/cli.js; chmod 755 .store/$package/cli.js
             cp -al .store/$package node_modules/.tmp-$package; mv node_modules/.tmp-$package node_modules/p$package
             mkdir -p node_modules/.bin; ln -s ../p$package/cli.js node_modules/.bin/p$package
         done
         mv node_modules node_modules.old; mkdir node_modules; mv node_modules.old/p* node_modules/; mv node_modules.old/.bin node_modules/.bin; rm -rf node_modules.old
         test $(ls node_modules | wc -l) = 60; node_modules/.bin/p7; test node_modules/p3/lib/4.js -ef .store/3/lib/4.js",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
}

#[test]
fn locks_hold_between_processes() {
    let mount = Mount::over(|base| fs::write(base.join("lock"), "0").unwrap());
    let branch = mount.create("branch");
    // Each adds one under a lock, fifty times; a lost update shows in the sum.
    let script = "import fcntl, os, sys
kind = sys.argv[1]
for _ in range(50):
    with open('lock', 'r+') as file:
        fcntl.flock(file, fcntl.LOCK_EX) if kind == 'flock' else fcntl.lockf(file, fcntl.LOCK_EX)
        value = int(file.read()) + 1
        file.seek(0); file.write(str(value)); file.flush(); os.fsync(file.fileno())
";
    fs::write(branch.join("add.py"), script).unwrap();
    for kind in ["flock", "fcntl"] {
        fs::write(branch.join("lock"), "0").unwrap();
        shell(
            &branch,
            &format!(
                "for i in 1 2 3 4; do python3 add.py {kind} & jobs=\"${{jobs:-}} $!\"; done; for job in $jobs; do wait $job; done; test $(cat lock) = 200"
            ),
        );
    }
    shell(
        &branch,
        "exec 9>lock; flock 9; ! flock -n lock true; ! timeout 1 flock lock true; exec 9>&-; flock -n lock true",
    );
}

#[test]
fn a_database_with_a_log_and_shared_memory_survives_a_kill() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let script = "import os, signal, sqlite3
def connect():
    connection = sqlite3.connect('db', isolation_level=None)
    connection.execute('pragma journal_mode=wal'); connection.execute('pragma mmap_size=100000000')
    return connection
connection = connect()
connection.execute('create table t(a integer primary key, b)')
acknowledged, told = os.pipe()
child = os.fork()
if child == 0:
    connection = connect()
    for i in range(100000):
        connection.execute('insert into t values (?, ?)', (i, 'x' * 500))
        os.write(told, b'.')
count = len(os.read(acknowledged, 100))
while count < 200:
    count += len(os.read(acknowledged, 1000))
os.kill(child, signal.SIGKILL); os.waitpid(child, 0); os.close(told)
rest = True
while rest:
    rest = os.read(acknowledged, 65536); count += len(rest)
connection = connect()
assert connection.execute('pragma integrity_check').fetchone() == ('ok',)
found, = connection.execute('select count(*) from t').fetchone()
assert count <= found <= count + 1, (count, found)
connection.execute('pragma wal_checkpoint(truncate)')
";
    fs::write(branch.join("work.py"), script).unwrap();
    shell(&branch, "python3 work.py");
    mount.commit("branch");
    shell(
        &mount.base(),
        "python3 -c \"import sqlite3; assert sqlite3.connect('db').execute('pragma integrity_check').fetchone() == ('ok',)\"",
    );
}

#[test]
fn a_database_server_is_made_loaded_killed_and_recovers() {
    const SERVER: &str = r#"bin=$(dirname "$(ls /usr/lib/postgresql/*/bin/initdb | tail -n 1)"); export PATH=$bin:$PATH PGHOST=$PWD PGUSER=postgres LC_ALL=C
        start() { pg_ctl -D data -s -w -t 120 -l log -o "-c listen_addresses= -c unix_socket_directories=$PWD -c shared_buffers=1MB" start; }"#;
    let as_server = |directory: &std::path::Path, script: &str| {
        let script = format!("{SERVER}\n{script}");
        let output = std::process::Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-euc", &script])
            .current_dir(directory)
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::inherit())
            .status();
        assert!(output.unwrap().success(), "{script}");
    };
    let mount =
        Mount::unmounted(|base| std::os::unix::fs::chown(base, Some(65534), Some(65534)).unwrap());
    shell(mount.directory.path(), "chmod 755 .");
    mount.mount();
    let branch = mount.create("branch");
    const SUMS: &str = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history) and (select sum(bbalance) from pgbench_branches) = (select sum(delta) from pgbench_history) and (select count(*) from pgbench_history) >= 40";
    as_server(
        &branch,
        &format!(
            r#"initdb -D data -U postgres -A trust --no-sync > /dev/null; start; createdb bench; pgbench -q -i -s 1 bench 2> /dev/null; pgbench -n -c 2 -t 20 bench > /dev/null
            (pgbench -n -c 2 -T 60 bench > /dev/null 2>&1 || true) & bench=$!
            until test "$(psql -Atc 'select count(*) > 60 from pgbench_history' bench)" = t; do sleep 0.01; done
            server=$(head -n 1 data/postmaster.pid); workers=$(pgrep -P $server); kill -9 $server; wait $bench
            for worker in $workers; do while test -e /proc/$worker; do sleep 0.01; done; done
            rm -f data/postmaster.pid; start; test "$(psql -Atc '{SUMS}' bench)" = t; psql -qc 'vacuum full' bench; pg_ctl -D data -s -w stop; rm -f log"#
        ),
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "after the commit");
    mount.unmount();
    as_server(
        &mount.base(),
        &format!(
            r#"start; test "$(psql -Atc '{SUMS}' bench)" = t; pg_ctl -D data -s -w -m immediate stop"#
        ),
    );
}
