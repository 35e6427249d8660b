//! S4 over S2: branches that took their children's commits, with directories moved at every level. A branch shows what its
//! commit leaves in the base; both are compared with an ordinary directory in which the same work was done.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::work::Random;
use common::{Content, Mount, Object, assert_same, shell, snapshot};

/// Names, types, contents and modes: the times differ between two runs of the same work.
fn without_times(root: &Path) -> BTreeMap<PathBuf, Object> {
    let strip = |object: Object| Object { mtime: (0, 0), ..object };
    snapshot(root).into_iter().map(|(path, object)| (path, strip(object))).collect()
}

const BASE: &str = "mkdir -p left other/deep/er files; seq 3 > left/kept; echo d > other/deep/f; echo e > other/deep/er/e; echo 1 > files/1; echo one > files/one";

/// Each work is done one level deeper; then all are committed, the deepest first.
fn nested(works: &[String], is_remounted: bool) {
    let native = tempfile::tempdir().unwrap();
    let mount = Mount::over(|base| shell(base, BASE));
    shell(native.path(), BASE);
    let mut parent = "main".to_owned();
    for (level, work) in works.iter().enumerate() {
        let name = format!("level-{level}");
        let branch = mount.create_below(&parent, &name);
        shell(&branch, work);
        shell(native.path(), work);
        parent = name;
    }
    let wanted = without_times(native.path());
    for level in (0..works.len()).rev() {
        let name = format!("level-{level}");
        let when = format!("{works:#?}\nlevel {level}");
        assert_same(&without_times(&mount.branch(&name)), &wanted, &when);
        if is_remounted {
            mount.unmount();
            mount.mount();
            assert_same(
                &without_times(&mount.branch(&name)),
                &wanted,
                &format!("{when}, remounted"),
            );
        }
        let before = snapshot(&mount.branch(&name));
        if level == 0 {
            common::succeed(&mount.run(&["diff", &name], &[]));
            common::succeed(&mount.run(&["commit", "--dry-run", &name], &[]));
        }
        mount.commit(&name);
        if level == 0 {
            assert_same(
                &snapshot(&mount.base()),
                &before,
                &format!("{when}: the base, times and all"),
            );
            common::succeed(&mount.run(&["undo"], &[]));
            shell(native.path(), &format!("rm -rf ./*; {BASE}"));
            let undone = without_times(&mount.base());
            assert_same(&undone, &without_times(native.path()), &format!("{when}: undone"));
        }
    }
}

#[test]
fn directories_that_moved_at_several_levels_arrive_with_all_that_is_in_them() {
    for (number, works) in [
        ["mv left right", "mv right left"],
        ["mv left right", "mv right third"],
        ["mkdir -p n/s; echo > n/s/f", "mv n/s t"],
        ["mkdir -p n/s; echo > n/s/f", "mv n/s a"],
        ["mv other moved", "mv moved/deep d"],
        ["mv other moved", "mv moved/deep a; echo new > moved/new"],
        ["mv left right; mkdir left; echo > left/new", "mv left x; mv right left"],
        ["mkdir k; mv other k/o", "mv k j; mv j/o/deep left/deep; mv j other"],
        ["mv other/deep/er left/er; rm -r other", "mv left/er .; mkdir other; mv left other/l"],
        ["mv left l; mv other left; mv l other", "mv left l; mv other left; mv l other"],
        ["mv files f; echo more >> f/1", "mv f files; rm files/one; mv files g"],
        ["rm -r other; mkdir other; echo > other/o", "mv other left/o; mv left other"],
    ]
    .iter()
    .enumerate()
    {
        nested(&works.map(str::to_owned), number % 2 == 0);
    }
}

fn directories(root: &Path) -> Vec<PathBuf> {
    let tree = snapshot(root);
    let directories = tree.into_iter().filter(|(_, object)| object.content == Content::Directory);
    directories.map(|(path, _)| path).collect()
}

/// Some lines of shell that move, make, fill and remove directories of the tree at `root`, and do it there.
fn work(root: &Path, random: &mut Random) -> String {
    const NAMES: [&str; 6] = ["a", "b", "left", "other", "deep", "z"];
    let mut lines = Vec::new();
    for _ in 0..=random.below(5) {
        let present = directories(root);
        let from = &present[random.below(present.len())];
        let into = &present[random.below(present.len())];
        let to = into.join(NAMES[random.below(NAMES.len())]);
        let (shown, target) = (from.display(), to.display());
        let is_root = from.as_os_str().is_empty();
        let is_free = !root.join(&to).exists();
        let line = match random.below(8) {
            0..=3 if !is_root && is_free && !to.starts_with(from) => {
                format!("mv -T ./{shown} ./{target}")
            }
            4 if is_free => format!("mkdir ./{target}; echo {} > ./{target}/new", random.below(99)),
            5 if !is_root => format!("rm -r ./{shown}"),
            6 if !is_root => format!("chmod 7{}5 ./{shown}", random.below(8)),
            _ => format!("echo {} >> ./{shown}/file; true", random.below(99)),
        };
        // A plain file may stand where a directory's name was drawn: then the line fails in both places alike.
        let line = format!("({line}) 2>/dev/null || true");
        shell(root, &line);
        lines.push(line);
    }
    lines.join("\n")
}

#[test]
fn random_moves_at_every_level_arrive_as_in_an_ordinary_directory() {
    for seed in 1..=common::rounds(12, 400) as u64 {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let rehearsal = tempfile::tempdir().unwrap();
        shell(rehearsal.path(), BASE);
        let levels = 2 + random.below(3);
        let works: Vec<String> = (0..levels).map(|_| work(rehearsal.path(), &mut random)).collect();
        println!("seed {seed}");
        nested(&works, seed % 3 == 0);
    }
}
