//! Real programs at work in a branch.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

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
