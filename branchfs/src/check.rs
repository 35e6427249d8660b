//! The offline check of a store: what is in it against docs/format.md.
//!
//! The check reads; with `repair` it also does what loses nothing: it removes what no mount would use, makes directories
//! that are empty by nature, gives things back to the store's owner, and takes damaged lines out of a log (paths without
//! a line are judged by their times). What could lose work is told and left alone. The store is locked meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation};
use serde_json::Value;

use crate::error::{Context, Error};
use crate::overlay::parse_redirect;
use crate::tree::Tree;
use crate::view::HIDDEN;
use crate::workspace::{FORMAT, written_part};

/// Something that is not as the format has it.
#[derive(Debug)]
pub struct Damage {
    /// In the store.
    pub path: PathBuf,
    /// What is wrong, and what it means.
    pub what: String,
    /// It was put right.
    pub is_repaired: bool,
}

/// Checks the store at `path`, or the one in the base `path`.
///
/// # Errors
/// There is no store, it is in use, or it cannot be read.
pub fn check(path: &Path, repair: bool) -> Result<Vec<Damage>, Error> {
    let inner = path.join(HIDDEN);
    let store = if inner.is_dir() { inner } else { path.to_path_buf() };
    let (store, home) =
        match (fs::read_link(store.join("store")), fs::read_link(store.join("base"))) {
            (Ok(elsewhere), _) => (elsewhere, Some(store)),
            (_, Ok(base)) => (store, Some(base.join(HIDDEN))),
            _ => (store, None),
        };
    let format = store.join("format");
    let text = match fs::read(&format) {
        // Without it and without branches it is no store.
        Err(error) if error.kind() == ErrorKind::NotFound && store.join("branches").is_dir() => {
            Vec::new()
        }
        other => other.at(&format)?,
    };
    if !FORMAT.as_bytes().starts_with(written_part(&text)) {
        let found = String::from_utf8_lossy(&text).trim().to_owned();
        return Err(Error::Corrupt(format!("{} says {found:?}", format.display())));
    }
    let lock = match fs::File::open(store.join("lock")) {
        Err(error) if error.kind() == ErrorKind::NotFound => None, // nobody can hold it
        other => Some(other.at(&store)?),
    };
    match lock
        .as_ref()
        .map(|lock| rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive))
    {
        Some(Err(rustix::io::Errno::WOULDBLOCK)) => {
            let store = store.display();
            return Err(Error::Unsupported(format!(
                "the store {store} is in use: unmount it first"
            )));
        }
        Some(other) => other.at(&store)?,
        None => {}
    }
    let metadata = fs::metadata(&store).at(&store)?;
    let owner = (metadata.uid(), metadata.gid());
    let mut check = Check { store, home: home.clone(), owner, repair, damages: Vec::new() };
    if text != FORMAT.as_bytes() {
        let write = |path: &Path| fs::write(path, FORMAT);
        check.tell(Path::new("format"), "it is missing or cut off", Some(&write))?;
    }
    check.all()?;
    let mut damages = check.damages;
    if let Some(home) = home {
        let mut check =
            Check { store: home.clone(), home: None, owner, repair, damages: Vec::new() };
        check.base_side()?;
        let absolute = |damage: Damage| Damage { path: home.join(&damage.path), ..damage };
        damages.extend(check.damages.into_iter().map(absolute));
    }
    Ok(damages)
}

/// Puts the thing at a path right.
type Repair<'r> = dyn Fn(&Path) -> std::io::Result<()> + 'r;

struct Check {
    store: PathBuf,
    /// The base's own part, where the store is elsewhere: it has the veils.
    home: Option<PathBuf>,
    owner: (u32, u32),
    repair: bool,
    damages: Vec<Damage>,
}

/// What the check needs of a record.
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
        let (records, all_read) = self.records()?;
        self.relations(&records);
        self.layers(&records, all_read)?;
        self.transactions("journal")?;
        self.transactions("history")
    }

    /// What the base keeps of a store that is elsewhere.
    fn base_side(&mut self) -> Result<(), Error> {
        for name in ["layers", "journal", "history", "trash"] {
            self.directory(Path::new(name))?;
        }
        self.transactions("journal")?;
        self.transactions("history")
    }

    /// Tells a damage; `repair` puts it right, where that loses nothing.
    fn tell(
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
        let entries = match fs::read_dir(&full) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.at(&full)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry.at(&full)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// A directory that is there, of the owner's; it may be empty.
    fn directory(&mut self, path: &Path) -> Result<(), Error> {
        let full = self.store.join(path);
        let (uid, gid) = self.owner;
        match fs::symlink_metadata(&full) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let make = |path: &Path| {
                    fs::DirBuilder::new().mode(0o700).create(path)?;
                    std::os::unix::fs::lchown(path, Some(uid), Some(gid))
                };
                self.tell(path, "the directory is missing", Some(&make))
            }
            Err(error) => Err(error).at(&full),
            Ok(metadata) if !metadata.is_dir() => self.tell(path, "it is no directory", None),
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
        let give = |path: &Path| std::os::unix::fs::lchown(path, Some(uid), Some(gid));
        let what = format!("it belongs to user {}, not to the store's owner", metadata.uid());
        self.tell(path, what, Some(&give))
    }

    /// All records that can be read, and whether that is all of them.
    fn records(&mut self) -> Result<(BTreeMap<u64, Record>, bool), Error> {
        let (mut records, mut all_read) = (BTreeMap::new(), true);
        for name in self.names(Path::new("branches"))? {
            let path = Path::new("branches").join(&name);
            let Some(id) = name.strip_suffix(".json").and_then(|id| id.parse().ok()) else {
                self.tell(
                    &path,
                    "a draft that was never finished",
                    Some(&|path| fs::remove_file(path)),
                )?;
                continue;
            };
            self.owned(&path)?;
            let full = self.store.join(&path);
            match read_record(&fs::read(&full).at(&full)?, id) {
                Ok(record) => {
                    records.insert(id, record);
                }
                Err(what) => {
                    all_read = false;
                    self.tell(&path, what, None)?;
                }
            }
        }
        Ok((records, all_read))
    }

    fn relations(&mut self, records: &BTreeMap<u64, Record>) {
        let mut names: BTreeMap<&str, u64> = BTreeMap::new();
        let mut owners: BTreeMap<u64, u64> = BTreeMap::new();
        let mut found = Vec::new();
        for (id, record) in records {
            if let Some(other) = names.insert(&record.name, *id) {
                found.push((*id, format!("branch {other} has the name {:?} as well", record.name)));
            }
            for layer in &record.layers {
                if let Some(other) = owners.insert(*layer, *id) {
                    found.push((*id, format!("layer {layer} is branch {other}'s as well")));
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
                found.push((*id, "it is its own ancestor".to_owned()));
            } else if above != 0 {
                found.push((*id, format!("its parent {above} is gone")));
            }
        }
        for (id, what) in found {
            let path = Path::new("branches").join(format!("{id}.json"));
            self.damages.push(Damage { path, what, is_repaired: false });
        }
    }

    fn layers(&mut self, records: &BTreeMap<u64, Record>, all_read: bool) -> Result<(), Error> {
        let named: BTreeSet<u64> = records
            .values()
            .flat_map(|record| record.layers.iter().chain(&record.below).copied())
            .collect();
        let present = self.names(Path::new("layers"))?;
        for name in &present {
            let path = Path::new("layers").join(name);
            let is_named = name.parse().is_ok_and(|id| named.contains(&id));
            if is_named {
                self.layer(&path)?;
            } else if all_read {
                // The next mount would remove it as well.
                let remove = |path: &Path| fs::remove_dir_all(path);
                self.tell(&path, "no branch has this layer", Some(&remove))?;
            } else {
                self.tell(&path, "it may be the layer of a branch whose record is damaged", None)?;
            }
        }
        let is_veil = |id: &u64| {
            let home = self.home.as_ref();
            home.is_some_and(|home| home.join("layers").join(id.to_string()).is_dir())
        };
        let gone: Vec<u64> = named
            .iter()
            .copied()
            .filter(|id| !present.contains(&id.to_string()) && !is_veil(id))
            .collect();
        for layer in gone {
            let path = Path::new("layers").join(layer.to_string());
            self.tell(&path, "the layer is gone: what the branch changed is lost", None)?;
        }
        Ok(())
    }

    fn layer(&mut self, path: &Path) -> Result<(), Error> {
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
        let Ok(tree) = Tree::open_root(&upper) else {
            return self.tell(&path.join("upper"), "the layer has no content directory", None);
        };
        self.marks(&tree, Path::new(""), &path.join("upper"))
    }

    /// Marks of the overlay format mean something only on directories, and lead nowhere but into the layers below.
    fn marks(&mut self, tree: &Tree, directory: &Path, shown: &Path) -> Result<(), Error> {
        for entry in tree.list(directory).at(shown)? {
            let path = directory.join(&entry.name);
            for namespace in ["trusted.overlay.", "user.overlay."] {
                let value = |name: &str| {
                    tree.get_xattr(&path, OsStr::new(&format!("{namespace}{name}"))).ok()
                };
                if value("redirect").is_some_and(|to| parse_redirect(&to, &path).is_none()) {
                    self.tell(&shown.join(&path), "its redirect leads out of the layers", None)?;
                }
                if value("opaque").is_some_and(|value| value != b"y" && value != b"x") {
                    self.tell(&shown.join(&path), "its opaque mark has no known value", None)?;
                }
            }
            if entry.kind == FileType::Directory {
                self.marks(tree, &path, shown)?;
            }
        }
        Ok(())
    }

    fn log(&mut self, path: &Path) -> Result<(), Error> {
        let full = self.store.join(path);
        let text = match fs::read(&full) {
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
        let (uid, gid) = self.owner;
        let write = |path: &Path| {
            let draft = path.with_extension("new");
            fs::write(&draft, &content)?;
            fs::File::open(&draft)?.sync_all()?;
            std::os::unix::fs::lchown(&draft, Some(uid), Some(gid))?;
            fs::rename(&draft, path)
        };
        self.tell(path, format!("{damaged} lines of the log are damaged"), Some(&write))
    }

    fn transactions(&mut self, place: &str) -> Result<(), Error> {
        for name in self.names(Path::new(place))? {
            let path = Path::new(place).join(&name);
            let full = self.store.join(&path);
            self.owned(&path)?;
            if fs::read(full.join("plan")).is_ok_and(|plan| is_whole_plan(&plan)) {
                continue;
            }
            let holds = self.names(&path)?;
            let holds_objects =
                holds.iter().any(|name| !name.starts_with("plan") && name != "rollback");
            if place == "journal" && !holds_objects {
                let remove = |path: &Path| fs::remove_dir_all(path);
                self.tell(&path, "a transaction that was never decided", Some(&remove))?;
            } else {
                let what = "its plan is damaged, and it holds objects of the base or of a branch: copy them before anything is mounted";
                self.tell(&path, what, None)?;
            }
        }
        Ok(())
    }
}

fn read_record(text: &[u8], id: u64) -> Result<Record, &'static str> {
    let value: Value = serde_json::from_slice(written_part(text)).map_err(|error| {
        if error.is_eof() {
            "the record is no JSON, cut off by a loss of power; the next mount sets the branch aside"
        } else {
            "the record is no JSON; the branch cannot be opened, nor can the store"
        }
    })?;
    let numbers = |key: &str| -> Option<Vec<u64>> {
        value[key].as_array()?.iter().map(Value::as_u64).collect()
    };
    if value["id"].as_u64() != Some(id) {
        return Err(
            "the record is another branch's; the branch cannot be opened, nor can the store",
        );
    }
    let (Some(name), Some(parent), Some(layers), Some(below)) =
        (value["name"].as_str(), value["parent"].as_u64(), numbers("layers"), numbers("below"))
    else {
        return Err(
            "the record lacks a name, a parent or its layers; the branch cannot be opened, nor can the store",
        );
    };
    Ok(Record { name: name.to_owned(), parent, layers, below })
}

/// Its last line is the checksum of all before.
fn is_whole_plan(bytes: &[u8]) -> bool {
    const CHECKSUM_LINE_BYTES: usize = 9;
    bytes.len().checked_sub(CHECKSUM_LINE_BYTES).is_some_and(|end| {
        format!("{:08x}\n", crc32fast::hash(&bytes[..end])).as_bytes() == &bytes[end..]
    })
}
