//! The offline check of a store against docs/format.md.
//!
//! The check reads only. With `repair` it also makes changes that lose no data: it removes objects that no mount uses,
//! creates missing empty directories, restores the owner, and removes damaged lines from a log (paths without a line are
//! judged by their times). Faults whose repair could lose data are only reported. The store is locked meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags};
use serde_json::Value;

use crate::error::{Context, Error};
use crate::no_follow;
use crate::overlay::{Namespace, Redirect};
use crate::ownership;
use crate::rooted_dir::{self, RootedDir, remove_path};
use crate::view::HIDDEN;
use crate::workspace::{
    DRAFT, FORMAT, LOG, Located, inspect, is_cut_off, lock_for_check, trim_trailing_zeros,
};

/// A deviation from the format.
#[derive(Debug)]
pub struct Damage {
    /// Path of the damaged object, relative to the store; absolute for the part of an external store that is in the
    /// base.
    pub path: PathBuf,
    /// The fault and its consequence.
    pub what: String,
    /// Whether this check repaired it.
    pub is_repaired: bool,
}

/// Checks the store at `path`, or the one in the base `path`.
///
/// # Errors
/// There is no store, or it is in use or cannot be read.
pub fn check(path: &Path, repair: bool) -> Result<Vec<Damage>, Error> {
    let Located { store, base_store } = Located::at(path)?;
    [Some(&store), base_store.as_ref()].into_iter().flatten().try_for_each(|part| inspect(part))?;
    let format = store.join("format");
    let text = match no_follow::read(&format) {
        // Without it and without branches the directory is not a store.
        Err(error) if error.kind() == ErrorKind::NotFound && store.join("branches").is_dir() => {
            Vec::new()
        }
        other => other.at(&format)?,
    };
    if !FORMAT.as_bytes().starts_with(trim_trailing_zeros(&text)) {
        let found = String::from_utf8_lossy(&text).trim().to_owned();
        return Err(Error::Corrupt(format!("{} says {found:?}", format.display())));
    }
    let _lock = lock_for_check(&store)?;
    let metadata = fs::metadata(&store).at(&store)?;
    let owner = (metadata.uid(), metadata.gid());
    let is_user = fs::read_link(store.join("marks"))
        .is_ok_and(|word| word.as_os_str() == Namespace::User.word());
    let namespace = if is_user { Namespace::User } else { Namespace::Trusted };
    let mut check = Check {
        store,
        base_store: base_store.clone(),
        owner,
        namespace,
        repair,
        damages: Vec::new(),
    };
    if text != FORMAT.as_bytes() {
        let write = |path: &Path| no_follow::write(path, FORMAT.as_bytes());
        check.report(Path::new("format"), "it is missing or cut off", Some(&write))?;
    }
    check.all()?;
    let mut damages = check.damages;
    if let Some(base_store) = base_store {
        let mut check = Check {
            store: base_store.clone(),
            base_store: None,
            owner,
            namespace,
            repair,
            damages: Vec::new(),
        };
        check.base_side()?;
        let absolute = |damage: Damage| Damage { path: base_store.join(&damage.path), ..damage };
        damages.extend(check.damages.into_iter().map(absolute));
    }
    Ok(damages)
}

/// Repairs the object at a path.
type Repair<'r> = dyn Fn(&Path) -> std::io::Result<()> + 'r;

struct Check {
    store: PathBuf,
    /// The part of the store that is in the base, with the snapshot layers, if the store is external.
    base_store: Option<PathBuf>,
    owner: (u32, u32),
    /// The xattr namespace of the layers.
    namespace: Namespace,
    repair: bool,
    damages: Vec<Damage>,
}

/// Files in a journal entry, apart from its plan, that are not objects.
const MARKS: [&str; 2] = ["rollback", "finished"];

/// What the lines of the branch log say. The check skips a line that it cannot read.
#[derive(Default)]
struct LogContents {
    records: BTreeMap<u64, Record>,
    /// Layers that were on disk.
    created: BTreeSet<u64>,
    /// Numbers that belong to no branch.
    deleted: BTreeSet<u64>,
    /// Every line could be read.
    all_read: bool,
}

/// The part of a branch record that the check needs.
struct Record {
    name: String,
    parent: u64,
    layers: Vec<u64>,
    below: Vec<u64>,
}

impl Check {
    fn all(&mut self) -> Result<(), Error> {
        for name in ["branches", "layers", "journal", "history", "trash"] {
            self.directory(Path::new(name))?;
        }
        let books = self.books()?;
        self.check_references(&books.records);
        self.check_layers(&books)?;
        self.transactions("journal")?;
        self.transactions("history")
    }

    /// Checks the part of an external store that is in the base.
    fn base_side(&mut self) -> Result<(), Error> {
        for name in ["layers", "journal", "history", "trash"] {
            self.directory(Path::new(name))?;
        }
        self.transactions("journal")?;
        self.transactions("history")
    }

    /// Reports a fault. `repair` corrects it if that loses nothing.
    fn report(
        &mut self,
        path: &Path,
        what: impl Into<String>,
        repair: Option<&Repair<'_>>,
    ) -> Result<(), Error> {
        let full = self.store.join(path);
        let is_repaired = match repair {
            Some(repair) if self.repair => {
                repair(&full).at(&full)?;
                true
            }
            _ => false,
        };
        self.damages.push(Damage { path: path.to_path_buf(), what: what.into(), is_repaired });
        Ok(())
    }

    fn names(&self, path: &Path) -> Result<Vec<String>, Error> {
        let full = self.store.join(path);
        let found = match no_follow::names(&full) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.at(&full)?,
        };
        let mut names: Vec<String> =
            found.into_iter().map(|name| name.to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Checks that a directory exists and belongs to the owner; it may be empty.
    fn directory(&mut self, path: &Path) -> Result<(), Error> {
        let full = self.store.join(path);
        let owner = self.owner;
        match fs::symlink_metadata(&full) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let make = |path: &Path| ownership::make_directory(path, owner);
                self.report(path, "the directory is missing", Some(&make))
            }
            Err(error) => Err(error).at(&full),
            Ok(metadata) if !metadata.is_dir() => self.report(path, "it is not a directory", None),
            Ok(_) => self.owned(path),
        }
    }

    /// The base's owner can always remove the store.
    fn owned(&mut self, path: &Path) -> Result<(), Error> {
        let full = self.store.join(path);
        let metadata = fs::symlink_metadata(&full).at(&full)?;
        let (uid, gid) = self.owner;
        if (metadata.uid(), metadata.gid()) == (uid, gid) {
            return Ok(());
        }
        let owner = self.owner;
        let give = |path: &Path| ownership::set(path, owner);
        let what = format!("it belongs to user {}, not to the store's owner", metadata.uid());
        self.report(path, what, Some(&give))
    }

    /// Reads the branch log as far as possible.
    fn books(&mut self) -> Result<LogContents, Error> {
        let place = Path::new("branches");
        let mut books = LogContents { all_read: true, ..LogContents::default() };
        for name in self.names(place)? {
            let path = place.join(&name);
            if name == DRAFT {
                let remove = no_follow::remove_file;
                self.report(&path, "a draft that was never finished", Some(&remove))?;
            } else if name == LOG {
                self.owned(&path)?;
                let full = self.store.join(&path);
                self.check_log_lines(&path, &no_follow::read(&full).at(&full)?, &mut books)?;
            } else {
                self.report(&path, "it does not belong here", None)?;
            }
        }
        Ok(books)
    }

    fn check_log_lines(
        &mut self,
        path: &Path,
        text: &[u8],
        books: &mut LogContents,
    ) -> Result<(), Error> {
        let mut whole = 0;
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            if is_cut_off(line) {
                let cut = |path: &Path| no_follow::open_file(path, OFlags::WRONLY)?.set_len(whole);
                return self.report(path, "its end is cut off by a loss of power", Some(&cut));
            }
            whole += line.len() as u64;
            let value: Value = serde_json::from_slice(line).unwrap_or_default();
            if let Some(gone) = value["gone"].as_u64() {
                books.records.remove(&gone);
                books.deleted.insert(gone);
            } else if let Some(made) = value["made"].as_u64() {
                books.created.insert(made);
            } else {
                match read_record(&value) {
                    Ok((id, record)) => {
                        books.deleted.remove(&id);
                        books.records.insert(id, record);
                    }
                    Err(what) => {
                        books.all_read = false;
                        self.report(path, what, None)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn check_references(&mut self, records: &BTreeMap<u64, Record>) {
        let mut names: BTreeMap<&str, u64> = BTreeMap::new();
        let mut owners: BTreeMap<u64, u64> = BTreeMap::new();
        let mut found = Vec::new();
        for (id, record) in records {
            if let Some(other) = names.insert(&record.name, *id) {
                found.push((*id, format!("branch {other} has the name {:?} as well", record.name)));
            }
            for layer in &record.layers {
                if let Some(other) = owners.insert(*layer, *id) {
                    found.push((*id, format!("has layer {layer}, as has branch {other}")));
                }
            }
            let mut above = record.parent;
            for _ in 0..=records.len() {
                match records.get(&above) {
                    Some(parent) => above = parent.parent,
                    None => break,
                }
            }
            if records.contains_key(&above) {
                found.push((*id, "is its own ancestor".to_owned()));
            } else if above != 0 {
                found.push((*id, format!("is below branch {above}, which is gone")));
            }
        }
        for (id, what) in found {
            let (path, what) = (Path::new("branches").join(LOG), format!("branch {id} {what}"));
            self.damages.push(Damage { path, what, is_repaired: false });
        }
    }

    fn check_layers(&mut self, books: &LogContents) -> Result<(), Error> {
        let layers = |of: fn(&Record) -> &Vec<u64>| -> BTreeSet<u64> {
            books.records.values().flat_map(of).copied().collect()
        };
        let (own, below) = (layers(|record| &record.layers), layers(|record| &record.below));
        let present = self.names(Path::new("layers"))?;
        for name in &present {
            let path = Path::new("layers").join(name);
            let id: Option<u64> = name.parse().ok();
            if let Some(id) = id.filter(|id| own.contains(id) || below.contains(id)) {
                self.check_layer(&path, books.created.contains(&id) || !own.contains(&id))?;
            } else if !books.all_read {
                self.report(
                    &path,
                    "it may be the layer of a branch whose record is damaged",
                    None,
                )?;
            } else if id.is_none_or(|id| books.deleted.contains(&id)) || self.is_unused(&path) {
                // The next mount would remove it as well.
                let remove = |path: &Path| Ok(remove_path(path)?);
                self.report(&path, "no branch has this layer", Some(&remove))?;
            } else {
                let what =
                    "no branch has this layer, which has content: the next mount sets it aside";
                self.report(&path, what, None)?;
            }
        }
        let is_veil = |id: &u64| {
            let base_store = self.base_store.as_ref();
            base_store.is_some_and(|base_store| {
                no_follow::open_directory(&base_store.join("layers").join(id.to_string())).is_ok()
            })
        };
        // A branch without changes has no layer on disk, and is not a snapshot layer.
        let wanted = own.intersection(&books.created).chain(below.difference(&own));
        let gone: Vec<u64> = wanted
            .copied()
            .filter(|id| !present.contains(&id.to_string()) && !is_veil(id))
            .collect();
        for layer in gone {
            let path = Path::new("layers").join(layer.to_string());
            self.report(&path, "the layer is gone: what the branch changed is lost", None)?;
        }
        Ok(())
    }

    /// A snapshot layer that no branch uses, or a layer without changes.
    fn is_unused(&self, path: &Path) -> bool {
        let full = self.store.join(path);
        no_follow::exists(&full.join("changes")).unwrap_or(false)
            || !no_follow::names(&full.join("upper"))
                .is_ok_and(|names| names.iter().any(|name| name != HIDDEN))
    }

    fn check_layer(&mut self, path: &Path, is_made: bool) -> Result<(), Error> {
        self.owned(path)?;
        for name in ["work", "links"] {
            let part = path.join(name);
            if self.store.join(&part).symlink_metadata().is_ok() {
                self.directory(&part)?;
            }
        }
        for name in ["writes", "reads"] {
            self.log(&path.join(name))?;
        }
        let upper = self.store.join(path).join("upper");
        let Ok(tree) = RootedDir::open_root(&upper) else {
            if !is_made {
                return Ok(());
            }
            return self.report(&path.join("upper"), "the layer has no content directory", None);
        };
        self.check_xattrs(&tree, &path.join("upper"))
    }

    /// Checks the overlay attributes below `tree`: they are valid only on directories, and a redirect leads only into
    /// the layers below. Paths that are too long to be read are skipped.
    fn check_xattrs(&mut self, tree: &RootedDir, shown: &Path) -> Result<(), Error> {
        let mut pending = vec![PathBuf::new()];
        while let Some(directory) = pending.pop() {
            for entry in tree.list(&directory).at(shown)? {
                let path = directory.join(&entry.name);
                if rooted_dir::check_length(&path).is_err() {
                    continue;
                }
                self.mark(tree, &path, shown)?;
                if entry.kind == FileType::Directory {
                    pending.push(path);
                }
            }
        }
        Ok(())
    }

    fn mark(&mut self, tree: &RootedDir, path: &Path, shown: &Path) -> Result<(), Error> {
        let value = |name: &str| tree.get_xattr(path, OsStr::new(name)).ok();
        if value(self.namespace.redirect()).is_some_and(|to| Redirect::parse(&to).is_none()) {
            self.report(&shown.join(path), "its redirect leads out of the layers", None)?;
        }
        if value(self.namespace.opaque()).is_some_and(|value| value != b"y" && value != b"x") {
            self.report(&shown.join(path), "its opaque mark has no known value", None)?;
        }
        Ok(())
    }

    fn log(&mut self, path: &Path) -> Result<(), Error> {
        let full = self.store.join(path);
        let text = match no_follow::read(&full) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.at(&full)?,
        };
        self.owned(path)?;
        let is_whole = |line: &&[u8]| {
            serde_json::from_slice::<Value>(line).is_ok_and(|value| value.is_object())
        };
        let lines: Vec<&[u8]> =
            text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).collect();
        let whole: Vec<&[u8]> = lines.iter().copied().filter(|line| is_whole(line)).collect();
        let damaged = lines.len() - whole.len();
        if damaged == 0 {
            return Ok(());
        }
        let mut content = whole.join(&b'\n');
        content.push(b'\n');
        let owner = self.owner;
        let write = |path: &Path| {
            let draft = path.with_extension("new");
            no_follow::write(&draft, &content)?;
            no_follow::open_file(&draft, OFlags::RDONLY)?.sync_all()?;
            ownership::set(&draft, owner)?;
            no_follow::rename(&draft, path)
        };
        self.report(path, format!("{damaged} lines of the log are damaged"), Some(&write))
    }

    fn transactions(&mut self, place: &str) -> Result<(), Error> {
        for name in self.names(Path::new(place))? {
            let path = Path::new(place).join(&name);
            let full = self.store.join(&path);
            self.owned(&path)?;
            if no_follow::read(&full.join("plan")).is_ok_and(|plan| is_whole_plan(&plan)) {
                continue;
            }
            let holds = self.names(&path)?;
            let holds_objects = holds
                .iter()
                .any(|name| !name.starts_with("plan") && !MARKS.contains(&name.as_str()));
            if place == "journal" && !holds_objects {
                let remove = |path: &Path| Ok(remove_path(path)?);
                self.report(&path, "an incomplete transaction", Some(&remove))?;
            } else {
                let what = "its plan is damaged, and it holds objects of the base or of a branch: copy them before anything is mounted";
                self.report(&path, what, None)?;
            }
        }
        Ok(())
    }
}

fn read_record(value: &Value) -> Result<(u64, Record), &'static str> {
    let numbers = |key: &str| -> Option<Vec<u64>> {
        value[key].as_array()?.iter().map(Value::as_u64).collect()
    };
    if !value.is_object() {
        return Err("a line is not JSON; the store cannot be opened");
    }
    let (Some(id), Some(name), Some(parent), Some(layers), Some(below)) = (
        value["id"].as_u64(),
        value["name"].as_str(),
        value["parent"].as_u64(),
        numbers("layers"),
        numbers("below"),
    ) else {
        return Err(
            "a record lacks an id, a name, a parent or its layers; the store cannot be opened",
        );
    };
    Ok((id, Record { name: name.to_owned(), parent, layers, below }))
}

/// Its last line is the checksum of all before.
fn is_whole_plan(bytes: &[u8]) -> bool {
    const CHECKSUM_LINE_BYTES: usize = 9;
    bytes.len().checked_sub(CHECKSUM_LINE_BYTES).is_some_and(|end| {
        format!("{:08x}\n", crc32fast::hash(&bytes[..end])).as_bytes() == &bytes[end..]
    })
}
