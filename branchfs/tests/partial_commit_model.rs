//! Random partial commits with changes of other programs in the base, undone and redone: the chosen paths are committed, the
//! others stay in the branch, and no change of another program is lost.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

pub(crate) mod common;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use common::work::{Operation, Random, apply, operation};
use common::{
    Content, Mount, Object, assert_same, refusal, shell, snapshot, snapshot_by_names, succeed,
};

type Tree = BTreeMap<PathBuf, Object>;

/// Without what moves by itself: times of directories, and links, of which a part may be taken.
fn outline(root: &Path) -> Tree {
    snapshot(root).into_iter().map(|(path, object)| (path, without_times(object))).collect()
}

fn without_times(object: Object) -> Object {
    Object { mtime: (0, 0), nlink: 0, ..object }
}

fn is_directory(object: &Object) -> bool {
    object.content == Content::Directory
}

fn fill(root: &Path) {
    shell(
        root,
        "mkdir -p a/b/e b 'c d'/a e; echo one >a/a; echo two >a/b/a; echo x >b/a; ln -s a b/e; ln a/a a/e; ln b/a e/x
         mkfifo b/b; chmod 700 e; find . -exec touch -h -d '2020-01-01 00:00:00.123456789' {} +",
    );
}

/// What a commit is to take, as its options and as a plain rule.
struct Choice {
    only: Vec<String>,
    exclude: Vec<String>,
}

impl Choice {
    fn random(random: &mut Random) -> Self {
        let mut patterns = |chance: usize| {
            let count = if random.below(3) < chance { 1 + random.below(2) } else { 0 };
            (0..count).map(|_| Self::pattern(random)).collect()
        };
        Self { only: patterns(2), exclude: patterns(1) }
    }

    fn pattern(random: &mut Random) -> String {
        const NAMES: [&str; 5] = ["a", "b", "c d", "e", "*"];
        let mut name = || NAMES[random.below(NAMES.len())];
        let (one, two) = (name(), name());
        match random.below(4) {
            0 | 1 => NAMES[random.below(4)].to_owned(),
            2 => format!("/{one}"),
            _ => format!("{one}/{two}"),
        }
    }

    fn options(&self) -> Vec<&str> {
        let only = self.only.iter().flat_map(|pattern| ["--only", pattern.as_str()]);
        only.chain(self.exclude.iter().flat_map(|pattern| ["--exclude", pattern.as_str()]))
            .collect()
    }

    fn takes(&self, path: &Path) -> bool {
        let matches = |pattern: &String| Self::matches(pattern, path);
        (self.only.is_empty() || self.only.iter().any(matches)) && !self.exclude.iter().any(matches)
    }

    fn matches(pattern: &str, path: &Path) -> bool {
        let names: Vec<&OsStr> = path.components().map(Component::as_os_str).collect();
        let is = |part: &str, name: &OsStr| part == "*" || name == OsStr::new(part);
        if !pattern.contains('/') {
            return names.iter().any(|name| is(pattern, name));
        }
        let parts: Vec<&str> = pattern.trim_start_matches('/').split('/').collect();
        parts.len() <= names.len() && parts.iter().zip(&names).all(|(part, name)| is(part, name))
    }

    /// What the base is to be; nothing where a part stands in the place of another.
    fn wanted(&self, before: &Tree, ours: &Tree) -> Option<Tree> {
        let mut wanted = Tree::new();
        for path in before.keys().chain(ours.keys()) {
            let from = if self.takes(path) { ours } else { before };
            if let Some(object) = from.get(path) {
                wanted.insert(path.clone(), object.clone());
            }
        }
        for path in wanted.keys().cloned().collect::<Vec<_>>() {
            for above in path.ancestors().skip(1) {
                let found = [&wanted, before, ours].into_iter().find_map(|tree| tree.get(above));
                let found = found.cloned().filter(is_directory)?;
                wanted.insert(above.to_path_buf(), found);
            }
        }
        Some(wanted)
    }
}

/// How many paths a commit says that the branch keeps.
fn remaining(done: &std::process::Output) -> usize {
    let said = String::from_utf8_lossy(&done.stderr);
    said.trim().rsplit_once("not committed: ").map_or(0, |(_, count)| count.parse().unwrap())
}

struct Trial {
    seed: u64,
    random: Random,
    mount: Mount,
}

impl Trial {
    fn new(seed: u64) -> Self {
        Self { seed, random: Random(seed), mount: Mount::over(fill) }
    }

    fn work(&mut self, root: &Path, steps: usize) {
        for _ in 0..steps {
            let operation = operation(&mut self.random);
            let is_link = matches!(operation, Operation::Link(..));
            if !is_link || self.random.below(2) == 0 {
                let _ = apply(root, &operation);
            }
        }
    }

    fn base(&self) -> Tree {
        snapshot_by_names(&self.mount.base())
    }

    fn restart(&mut self) {
        match self.random.below(6) {
            0 => self.mount.kill(),
            1 => self.mount.unmount(),
            _ => return,
        }
        self.mount.mount();
    }

    fn has_renamed_directories(&self) -> bool {
        self.diff().iter().any(|one| one["change"] == "renamed" && one["kind"] == "directory")
    }

    /// The number of the last commit.
    fn last_commit(&self) -> Option<u64> {
        self.mount.ask("history")["entries"].as_array().unwrap().last()?["id"].as_u64()
    }

    /// Takes the last commit back and does it again, perhaps: the base is what it was each time. A commit that changed
    /// nothing leaves the history as it was, with `last` at its end.
    fn revert(&mut self, before: &Tree, last: Option<u64>, when: &str) {
        let after = self.base();
        if self.last_commit() == last {
            return assert_same(&after, before, when);
        }
        let times = self.random.below(4);
        for time in 0..times {
            self.restart();
            let (verb, wanted) = if time % 2 == 0 { ("undo", before) } else { ("redo", &after) };
            let done = self.mount.run(&[verb], &[]);
            assert!(done.status.success(), "{when}, {verb}: {}", refusal(&done));
            assert_same(&self.base(), wanted, &format!("{when}, {verb}"));
        }
    }

    fn commit_a_part(&mut self, round: usize) {
        let branch = self.mount.create("work");
        let steps = 5 + self.random.below(30);
        self.work(&branch, steps);
        self.restart();
        let (before, ours, plain) = (self.base(), outline(&branch), outline(&self.mount.base()));
        let choice = Choice::random(&mut self.random);
        let when = format!("seed {}, round {round}, {:?}", self.seed, choice.options());
        let has_renamed = self.has_renamed_directories();
        let wanted = choice.wanted(&plain, &ours);
        let last = self.last_commit();
        let words = [&["commit"], &choice.options()[..], &["work"]].concat();
        let done = self.mount.run(&words, &[]);
        if !done.status.success() {
            let said = refusal(&done);
            assert_same(&self.base(), &before, &format!("{when}: {said}"));
            assert_same(&outline(&branch), &ours, &format!("{when}: {said}"));
            if said.contains("none of the") {
                // A directory that keeps something stays, chosen or not.
                assert!(has_renamed || wanted.as_ref() == Some(&plain), "{when}: {said}");
            } else {
                assert!(said.contains("choose"), "{when}: {said}");
                assert!(has_renamed || wanted.is_none(), "{when}: {said}");
            }
            return self.mount.abort("work");
        }
        if !has_renamed {
            let wanted = wanted.unwrap_or_else(|| panic!("{when}: not refused"));
            assert_same(&outline(&self.mount.base()), &wanted, &when);
        }
        let remaining = remaining(&done);
        if remaining == 0 {
            assert_same(&outline(&self.mount.base()), &ours, &format!("{when}: nothing is left"));
            return self.revert(&before, last, &when);
        }
        self.restart();
        let request =
            serde_json::json!({"v": 1, "verb": "commit", "branch": "work", "dry_run": true});
        let rest = self.mount.request(&request)["changes"].as_array().unwrap().clone();
        assert_eq!(rest.len(), remaining, "{when}: {rest:?}");
        assert_same(&outline(&branch), &ours, &format!("{when}: the branch after it"));
        if self.random.below(3) > 0 {
            self.commit_the_rest(&ours, &when);
        } else {
            self.mount.abort("work");
            self.revert(&before, last, &when);
        }
    }

    /// After some more work, perhaps.
    fn commit_the_rest(&mut self, ours: &Tree, when: &str) {
        let (branch, before, last) = (self.mount.branch("work"), self.base(), self.last_commit());
        let mut ours = ours.clone();
        if self.random.below(2) == 0 {
            self.work(&branch, 5);
            ours = outline(&branch);
        }
        self.restart();
        let when = format!("{when}, then the rest");
        let done = self.mount.run(&["commit", "work"], &[]);
        assert!(done.status.success(), "{when}: {}", refusal(&done));
        assert_eq!(remaining(&done), 0, "{when}");
        assert_same(&outline(&self.mount.base()), &ours, &when);
        self.revert(&before, last, &when);
    }

    /// What the branch changed.
    fn diff(&self) -> Vec<serde_json::Value> {
        let request = serde_json::json!({"v": 1, "verb": "diff", "branch": "work"});
        self.mount.request(&request)["changes"].as_array().unwrap().clone()
    }

    fn commit_beside_others(&mut self, round: usize) {
        let branch = self.mount.create("work");
        let origin = outline(&self.mount.base());
        let steps = 5 + self.random.below(15);
        self.work(&branch, steps);
        let ours = outline(&branch);
        let has_renamed = self.has_renamed_directories();
        common::wait_for_the_clock(&self.mount.base());
        let base = self.mount.base();
        let steps = 1 + self.random.below(6);
        self.work(&base, steps);
        self.restart();
        let (before, theirs) = (self.base(), outline(&base));
        let choice = Choice::random(&mut self.random);
        let is_chosen = self.random.below(2) == 0;
        let mut options = if is_chosen { choice.options() } else { Vec::new() };
        let option = ["", "--force", "--skip"][self.random.below(3)];
        options.extend(Some(option).filter(|option| !option.is_empty()));
        let when = format!("seed {}, round {round}, {options:?}", self.seed);
        let last = self.last_commit();
        let words = [&["commit"], &options[..], &["work"]].concat();
        let done = self.mount.run(&words, &[]);
        if !done.status.success() {
            assert_same(&self.base(), &before, &format!("{when}: {}", refusal(&done)));
            return self.mount.abort("work");
        }
        let is_open = remaining(&done) > 0;
        if is_open {
            // Elsewhere the kernel shows what others did, sooner or later.
            for path in origin.keys().chain(ours.keys()) {
                let (was, our) = (origin.get(path), ours.get(path));
                if was != our && !our.is_some_and(is_directory) {
                    let found = common::object(&branch.join(path)).map(without_times);
                    assert_eq!(found.as_ref(), our, "{when}: {} in the branch", path.display());
                }
            }
        }
        if has_renamed {
            if is_open {
                self.mount.abort("work");
            }
            return self.revert(&before, last, &when); // such a directory takes along what others did in it, to another path
        }
        let after = outline(&base);
        let file =
            |tree: &Tree, path: &PathBuf| tree.get(path).filter(|one| !is_directory(one)).cloned();
        for path in origin.keys().chain(theirs.keys()).chain(ours.keys()) {
            let [was, our, their, now] =
                [&origin, &ours, &theirs, &after].map(|tree| file(tree, path));
            let (is_ours, is_theirs) = (our != was, their != was);
            let takes = !is_chosen || choice.takes(path);
            let what = format!("{when}: {}", path.display());
            if is_theirs && (option == "--skip" || !takes || !is_ours && option.is_empty()) {
                assert_eq!(now, their, "{what}: theirs is lost");
            }
            if is_ours && takes && (option == "--force" || !is_theirs && option.is_empty()) {
                assert_eq!(now, our, "{what}: ours is lost");
            }
        }
        if !is_open {
            return self.revert(&before, last, &when);
        }
        self.restart();
        let done = self.mount.run(&["commit", "work"], &[]);
        let then = outline(&base);
        for path in origin.keys().chain(theirs.keys()).chain(ours.keys()) {
            let [was, our, their, now] =
                [&origin, &ours, &theirs, &then].map(|tree| file(tree, path));
            let is_forced = option == "--force" && (!is_chosen || choice.takes(path));
            if their != was && !is_forced {
                let what = format!("{when}, then the rest: {}", path.display());
                assert!(now == their || now == our && our == their, "{what}: theirs is lost");
            }
        }
        if !done.status.success() {
            assert!(refusal(&done).contains("changed directly"), "{when}: {}", refusal(&done));
            self.mount.abort("work");
        }
    }
}

#[test]
fn a_path_deleted_with_its_parent_can_be_selected() {
    let cases = [
        ("rm -r a", "a/e"),
        ("rm -r a/b", "a/b/a"),
        ("rm -r a; mkdir a", "a/e"),
        ("rm -r a/b; mkdir a/b", "a/b/a"),
        ("rm -r a; touch a", "a/e"),
        ("rm -r a/b; ln -s e a/b", "a/b/a"),
    ];
    for (work, name) in cases {
        let mount = Mount::over(fill);
        let (base, branch) = (mount.base(), mount.create("work"));
        let mut wanted = outline(&base);
        shell(&branch, work);
        let shown = outline(&branch);
        succeed(&mount.run(&["commit", "--only", name, "work"], &[]));
        assert_same(&outline(&mount.branch("work")), &shown, work);
        mount.abort("work");
        assert!(wanted.remove(Path::new(name)).is_some());
        assert_same(&outline(&base), &wanted, work);
        succeed(&mount.run(&["undo"], &[]));
        assert!(base.join(name).exists(), "{work}");
    }
}

#[test]
fn a_part_is_what_was_chosen() {
    for seed in 1..=common::rounds(5, 1000) as u64 {
        let mut trial = Trial::new(seed);
        (0..6).for_each(|round| trial.commit_a_part(round));
    }
}

#[test]
fn nothing_that_others_do_is_lost() {
    for seed in 1..=common::rounds(5, 1000) as u64 {
        let mut trial = Trial::new(seed);
        (0..6).for_each(|round| trial.commit_beside_others(round));
    }
}
