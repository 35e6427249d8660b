//! Power loss during a mount, a create and an abort: files that were not synced are truncated, zeroed or missing, and
//! operations of several steps are half done. Each time the store can be mounted, everything synced is there, and no
//! file that a user wrote is deleted.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{BranchRef, CommitOptions, Policy, Settings, Workspace};
use crate::ids::LayerId;
use crate::layer::Layer;
use crate::overlay::Namespace;
use crate::write_set::{Precondition, Read};

/// A store with a branch that was synced, and another one, not synced, in which something was written.
struct Store {
    directory: tempfile::TempDir,
}

const SETTINGS: Settings = Settings {
    policy: Policy::Serializable,
    history_commits_max: 10,
    is_recovery: false,
    open_log: |_, _| (),
};

impl Store {
    fn new() -> Self {
        let store = Self { directory: tempfile::tempdir().unwrap() };
        fs::create_dir(store.base()).unwrap();
        fs::write(store.base().join("file"), "base").unwrap();
        let workspace = store.open();
        for name in ["synced", "fresh"] {
            let id = workspace.create(name, &BranchRef::Id(0)).unwrap().id;
            workspace.make_layer_for_tests(id);
            fs::write(store.layer(id).join("upper/file"), name).unwrap();
        }
        store
    }

    fn copy(&self) -> Self {
        let copy = Self { directory: tempfile::tempdir().unwrap() };
        let made = Command::new("cp").arg("-a").args([self.base(), copy.base()]).status().unwrap();
        assert!(made.success());
        copy
    }

    fn base(&self) -> PathBuf {
        self.directory.path().join("base")
    }

    fn path(&self, below: &str) -> PathBuf {
        self.base().join(".branching").join(below)
    }

    /// The log of records.
    fn log(&self) -> PathBuf {
        self.path("branches/log")
    }

    fn layer(&self, id: u64) -> PathBuf {
        self.path("layers").join(id.to_string())
    }

    fn open(&self) -> Workspace {
        Workspace::open_again(&self.base(), None, SETTINGS)
    }

    fn ids(&self) -> (u64, u64) {
        let branches = self.open().list().unwrap();
        let id = |name: &str| branches.iter().find(|branch| branch.name == name).unwrap().id;
        (id("synced"), id("fresh"))
    }

    /// Mounts twice, and checks the content.
    fn check(&self, (synced, fresh): (u64, u64), is_written: bool, when: &str) {
        for turn in ["first", "second"] {
            let workspace = self.open();
            let names: BTreeSet<String> =
                workspace.list().unwrap().into_iter().map(|branch| branch.name).collect();
            drop(workspace);
            assert!(names.contains("synced"), "{when}, {turn} mount: {names:?}");
            let read = |path: PathBuf| fs::read_to_string(path).ok();
            let kept = read(self.layer(synced).join("upper/file"));
            assert_eq!(kept.as_deref(), Some("synced"), "{when}, {turn} mount");
            let lost = self.path("lost").join(fresh.to_string());
            let place = if names.contains("fresh") { self.layer(fresh) } else { lost };
            let written = read(place.join("upper/file"));
            assert_eq!(written.is_some(), is_written, "{when}, {turn} mount: {}", place.display());
        }
        assert_eq!(fs::read_to_string(self.base().join("file")).unwrap(), "base", "{when}");
    }
}

/// How much of a log of records is before the first line of this branch: what was there when the others were synced.
fn before(log: &[u8], id: u64) -> usize {
    let (log, begin) = (std::str::from_utf8(log).unwrap(), format!("{{\"id\":{id},"));
    log.split_inclusive('\n').take_while(|line| !line.starts_with(&begin)).map(str::len).sum()
}

/// What a disk may leave of a file that was not synced.
fn torn(content: &[u8]) -> impl Iterator<Item = Vec<u8>> + '_ {
    (0..=content.len()).flat_map(|length| {
        let zeros = content[length..].iter().map(|_| 0);
        [content[..length].to_vec(), content[..length].iter().copied().chain(zeros).collect()]
    })
}

#[test]
fn a_store_whose_unsynced_files_a_power_cut_has_torn_can_be_mounted() {
    let store = Store::new();
    let ids = store.ids();
    let fresh = ids.1;
    // The logs that a change makes.
    let nothing = Path::new("file");
    let layer = Layer::open(LayerId(fresh), &store.layer(fresh), Namespace::Trusted, false);
    let mut layer = layer.unwrap();
    layer.record_reads().unwrap();
    layer.record_precondition(nothing, Precondition::Absent).unwrap();
    layer.record_read(nothing, Read::NegativeLookup).unwrap();
    let unsynced = [
        "format".to_owned(),
        ".gitignore".to_owned(),
        "lock".to_owned(),
        "branches/log".to_owned(),
        format!("layers/{fresh}/writes"),
        format!("layers/{fresh}/reads"),
    ];
    let mut all = Vec::new();
    for path in &unsynced {
        let content = fs::read(store.path(path)).unwrap();
        let synced = if path == "branches/log" { before(&content, fresh) } else { 0 };
        let (synced, content) = content.split_at(synced);
        // Short files at every byte, records at every third.
        let step = if content.len() > 64 { 7 } else { 2 };
        for (number, left) in torn(content).enumerate().step_by(step) {
            let copy = store.copy();
            fs::write(copy.path(path), [synced, &left].concat()).unwrap();
            copy.check(ids, true, &format!("{path}, state {number}"));
        }
        all.push((path, synced.to_vec(), content.to_vec()));
    }
    for keep in [0, 1, 2] {
        let copy = store.copy();
        for (path, synced, content) in &all {
            let left = &content[..content.len() * keep / 3];
            fs::write(copy.path(path), [synced, left].concat()).unwrap();
        }
        copy.check(ids, true, &format!("{keep} thirds of all of them"));
    }
}

#[test]
fn a_create_and_a_first_change_that_were_cut_anywhere_are_whole_or_nothing() {
    let store = Store::new();
    let (synced, fresh) = store.ids();
    fs::remove_file(store.layer(fresh).join("upper/file")).unwrap();
    let log = fs::read(store.log()).unwrap();
    let (begins, ends) = (before(&log, fresh), log.len());
    let made = ends - "{\"made\":}\n".len() - fresh.to_string().len();
    // From its end to its beginning: of directories what was made last is lost first, and lines are lost apart from them.
    let directories = ["", "rename upper upper.new", "remove upper.new", "remove reads", "remove "];
    for (number, length) in (begins..=ends).enumerate() {
        // Each byte of a line is as good as another.
        if number % 11 != 0 && ![made, made + 1, ends].contains(&length) {
            continue;
        }
        for lost in 0..directories.len() {
            // A layer is announced after it is there. Without its `upper` it was being removed, after an abort.
            let is_announced = length == ends;
            let copy = store.copy();
            fs::write(copy.log(), &log[..length]).unwrap();
            for step in &directories[1..=lost] {
                let (verb, names) = step.split_once(' ').unwrap();
                let mut names = names.split(' ').map(|name| copy.layer(fresh).join(name));
                let path = names.next().unwrap();
                match verb {
                    "rename" => fs::rename(&path, names.next().unwrap()).unwrap(),
                    _ if path.is_dir() => fs::remove_dir(&path).unwrap(),
                    _ => fs::remove_file(&path).unwrap(),
                }
            }
            let when = format!("{length} bytes of {ends}, {lost} steps are lost");
            copy.check((synced, fresh), false, &when);
            // What there is can be changed and committed.
            let workspace = copy.open();
            let branch = BranchRef::Name("fresh".to_owned());
            let is_there = workspace.list().unwrap().iter().any(|branch| branch.name == "fresh");
            assert_eq!(is_there, length >= made && !(is_announced && lost > 0), "{when}");
            if is_there {
                workspace.make_layer_for_tests(fresh);
                workspace.commit(&branch, &CommitOptions::default()).expect(&when);
            }
        }
    }
}

#[test]
fn a_parent_that_was_lost_takes_its_children_along_and_nothing_written_is_thrown_away() {
    let store = Store::new();
    let (synced, fresh) = store.ids();
    let workspace = store.open();
    let child = workspace.create("child", &BranchRef::Id(fresh)).unwrap().id;
    workspace.make_layer_for_tests(child);
    drop(workspace);
    fs::write(store.layer(child).join("upper/file"), "child").unwrap();
    let log = fs::read(store.log()).unwrap();
    fs::write(store.log(), &log[..before(&log, fresh)]).unwrap();
    store.check((synced, fresh), true, "the log ends before the parent");
    let lost = store.path("lost").join(child.to_string());
    assert_eq!(fs::read_to_string(lost.join("upper/file")).unwrap(), "child");
    let workspace = store.open();
    workspace.abort(&BranchRef::Id(synced)).unwrap();
    workspace.close().unwrap();
    assert!(lost.exists(), "the store stays as long as it keeps what was lost");
}

#[test]
fn an_abort_that_was_cut_anywhere_has_happened_or_not() {
    let store = Store::new();
    let (synced, fresh) = store.ids();
    for (when, leaves_record, leaves_layer) in [
        ("nothing is lost", false, false),
        ("the layer is not in the trash", false, true),
        ("the line is lost, as it was not synced", true, false),
        ("nothing happened", true, true),
    ] {
        let copy = store.copy();
        if !leaves_record {
            let mut log = fs::read(copy.log()).unwrap();
            log.extend(format!("{{\"gone\":{fresh}}}\n").into_bytes());
            fs::write(copy.log(), log).unwrap();
        }
        if !leaves_layer {
            fs::rename(copy.layer(fresh), copy.path("trash/layer")).unwrap();
        }
        let is_there = leaves_record && leaves_layer;
        copy.check((synced, fresh), is_there, when);
        assert_eq!(copy.layer(fresh).exists(), is_there, "{when}");
    }
}

#[test]
fn a_log_that_is_damaged_in_another_way_refuses_the_mount() {
    let store = Store::new();
    for damage in ["x", "\n", "{\"id\":1}\n"] {
        let copy = store.copy();
        let log = fs::read(copy.log()).unwrap();
        fs::write(copy.log(), [damage.as_bytes(), &log].concat()).unwrap();
        let refused = Workspace::open(&copy.base(), None, SETTINGS).err().unwrap();
        assert!(refused.to_string().contains("branches/log, line 1"), "{refused}");
    }
}

#[test]
fn the_log_is_rewritten_without_finished_records() {
    let store = Store::new();
    let workspace = store.open();
    let before = fs::metadata(store.log()).unwrap().len();
    for number in 0..50 {
        workspace.create(&format!("short{number}"), &BranchRef::Id(0)).unwrap();
        workspace.abort(&BranchRef::Name(format!("short{number}"))).unwrap();
    }
    drop(workspace);
    assert!(fs::metadata(store.log()).unwrap().len() > 2 * before);
    let ids = store.ids();
    assert_eq!(fs::metadata(store.log()).unwrap().len(), before);
    store.check(ids, true, "after it");
}

#[test]
fn a_first_mount_that_was_cut_anywhere_is_made_again() {
    let made =
        ["format", ".gitignore", "branches", "layers", "journal", "history", "trash", "lock"];
    for kept in 0..made.len() {
        let directory = tempfile::tempdir().unwrap();
        let store = directory.path().join(".branching");
        fs::create_dir(&store).unwrap();
        for name in &made[..kept] {
            match *name {
                "format" => fs::write(store.join(name), super::FORMAT).unwrap(),
                ".gitignore" => fs::write(store.join(name), "*\n").unwrap(),
                _ => fs::create_dir(store.join(name)).unwrap(),
            }
        }
        fs::create_dir_all(store.join("probe/left")).unwrap();
        let workspace = Workspace::open(directory.path(), None, SETTINGS).unwrap();
        workspace.create("branch", &BranchRef::Id(0)).unwrap();
        assert_eq!(fs::read_link(store.join("marks")).unwrap(), Path::new("trusted"));
        workspace.abort(&BranchRef::Name("branch".to_owned())).unwrap();
        workspace.close().unwrap();
        assert!(!store.exists(), "{kept} parts were there");
    }
}
