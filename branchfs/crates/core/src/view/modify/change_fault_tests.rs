//! Each file system call of a change of names fails once: the change has happened or not, deleted names stay deleted, and
//! numbers of links are right, now and after a remount.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;

use rustix::fs::RenameFlags;

use super::{New, Owner};
use crate::faults::{Faults, with_faults};
use crate::rooted_dir::Result;
use crate::transaction::step_crash_tests::{find, make, parent, remove_tree, unlink, write};
use crate::view::{NodeIndex, ROOT, View};
use crate::workspace::{BranchRef, Settings, Workspace};

/// Path, and what is shown there: mode, number of links, size.
type Shown = BTreeMap<PathBuf, (u32, u32, u64)>;

struct Case {
    name: &'static str,
    /// Goes before.
    prepare: fn(&mut View),
    /// Calls may fail from its call of `begin` on.
    change: fn(&mut View, &Faults) -> Result<()>,
}

fn named(view: &mut View, path: &str) -> (NodeIndex, String) {
    parent(view, path)
}

fn rename(view: &mut View, faults: &Faults, from: &str, to: &str) -> Result<()> {
    let (from, from_name) = named(view, from);
    let (to, to_name) = named(view, to);
    faults.begin();
    view.rename((from, OsStr::new(&from_name)), (to, OsStr::new(&to_name)), RenameFlags::empty())
}

fn remove(view: &mut View, faults: &Faults, path: &str) -> Result<()> {
    let (parent, name) = named(view, path);
    faults.begin();
    view.unlink(parent, OsStr::new(&name))
}

fn link_unnamed(view: &mut View, faults: &Faults) -> Result<()> {
    let owner = Owner { uid: 0, gid: 0 };
    let (index, _, file) = view.create_unnamed(ROOT, 0o644, 0, owner)?;
    view.tree.nodes.add_lookup(index);
    view.add_handle(index, file, true, None)?;
    faults.begin();
    view.link(index, ROOT, OsStr::new("deleted")).map(drop)
}

fn link_named(view: &mut View, faults: &Faults) -> Result<()> {
    let index = find(view, "single");
    faults.begin();
    view.link(index, ROOT, OsStr::new("deleted")).map(drop)
}

const CASES: &[Case] = &[
    Case { name: "unlink", prepare: |_| (), change: |view, faults| remove(view, faults, "one") },
    Case {
        name: "unlink of a copy",
        prepare: |view| write(view, "one", "changed"),
        change: |view, faults| remove(view, faults, "one"),
    },
    Case {
        name: "rename over a linked file",
        prepare: |view| write(view, "one", "changed"),
        change: |view, faults| rename(view, faults, "single", "one"),
    },
    Case {
        name: "rename over a file that is not copied up",
        prepare: |_| (),
        change: |view, faults| rename(view, faults, "single", "one"),
    },
    Case {
        name: "link of an unnamed file over a deleted name",
        prepare: |view| unlink(view, "deleted"),
        change: link_unnamed,
    },
    Case {
        name: "link over a deleted name",
        prepare: |view| unlink(view, "deleted"),
        change: link_named,
    },
    Case {
        name: "rename over a directory that was emptied",
        prepare: |view| {
            unlink(view, "directory/file");
            make(view, "made", New::Directory { mode: 0o755 });
            write(view, "made/inside", "inside");
        },
        change: |view, faults| rename(view, faults, "made", "directory"),
    },
    Case {
        name: "rename over a new directory that has whiteouts",
        prepare: |view| {
            remove_tree(view, "directory");
            make(view, "directory", New::Directory { mode: 0o755 });
            write(view, "directory/short", "short");
            unlink(view, "directory/short");
            make(view, "made", New::Directory { mode: 0o755 });
        },
        change: |view, faults| rename(view, faults, "made", "directory"),
    },
    Case {
        name: "removal of a directory that was emptied",
        prepare: |view| unlink(view, "directory/file"),
        change: |view, faults| {
            faults.begin();
            view.rmdir(ROOT, OsStr::new("directory"))
        },
    },
];

fn shown(view: &mut View) -> Shown {
    let mut found = Shown::new();
    for path in [
        "one",
        "two",
        "single",
        "deleted",
        "directory",
        "directory/file",
        "directory/inside",
        "made",
        "made/inside",
    ] {
        let mut at = ROOT;
        let mut attributes = None;
        for part in path.split('/') {
            attributes = None;
            let Ok(Some((index, is))) = view.tree.lookup(at, OsStr::new(part)) else { break };
            view.tree.nodes.add_lookup(index);
            (at, attributes) = (index, Some(is));
        }
        if let Some(is) = attributes {
            let is_directory = is.mode & libc::S_IFMT == libc::S_IFDIR;
            let (links, size) = if is_directory { (0, 0) } else { (is.nlink, is.size) };
            found.insert(path.into(), (is.mode, links, size));
        }
    }
    found
}

struct NodeLocation(tempfile::TempDir);

impl NodeLocation {
    fn new(case: &Case) -> Self {
        let place = Self(tempfile::tempdir_in("/dev/shm").unwrap());
        let base = place.0.path();
        fs::create_dir(base.join("directory")).unwrap();
        for name in ["one", "single", "deleted", "directory/file"] {
            fs::write(base.join(name), "old").unwrap();
        }
        fs::hard_link(base.join("one"), base.join("two")).unwrap();
        let workspace = place.open();
        workspace.create("branch", &BranchRef::Id(0)).unwrap();
        (case.prepare)(&mut workspace.mount().mounted(1).unwrap().lock());
        place
    }

    fn open(&self) -> Workspace {
        Workspace::open_again(self.0.path(), None, Settings::default())
    }

    fn shown(&self) -> Shown {
        let workspace = self.open();
        let mounted = workspace.mount().mounted(1).unwrap();
        let mut view = mounted.lock();
        shown(&mut view)
    }
}

/// What the change answers, what the branch shows then, and the number of calls.
fn run(case: &Case, place: &NodeLocation, at: usize, error: i32) -> (Result<()>, Shown, usize) {
    let mut count = 0;
    let decide = |_| {
        count += 1;
        (count == at).then_some(error)
    };
    let (outcome, now) = with_faults(decide, |faults| {
        let workspace = place.open();
        let mounted = workspace.mount().mounted(1).unwrap();
        let mut view = mounted.lock();
        let _ = shown(&mut view); // as programs that have looked at it
        let outcome = (case.change)(&mut view, faults);
        faults.end();
        (outcome, shown(&mut view))
    });
    (outcome, now, count)
}

#[test]
fn a_change_of_names_has_happened_or_not_whichever_call_fails() {
    for case in CASES {
        let place = NodeLocation::new(case);
        let old = place.shown();
        let (outcome, now, calls) = run(case, &place, 0, 0);
        outcome.unwrap();
        let new = place.shown();
        assert_eq!(now, new, "{}", case.name);
        assert_ne!(old, new, "{}", case.name);
        for error in [libc::EIO, libc::ENOSPC] {
            for at in 1..=calls {
                let place = NodeLocation::new(case);
                let (outcome, now, _) = run(case, &place, at, error);
                let when =
                    format!("{}: call {at} of {calls} fails with {error}: {outcome:?}", case.name);
                let wanted = if outcome.is_ok() { &new } else { &old };
                // The attributes that a link answers are asked for when it is there.
                let is_answer = case.name.starts_with("link");
                let wanted = if is_answer && now == new { &new } else { wanted };
                assert_eq!(&now, wanted, "{when}");
                assert_eq!(&place.shown(), wanted, "{when}, after a remount");
            }
        }
    }
}
