//! Files that are open or mapped while their name is replaced by another object: the reader keeps the file that it opened,
//! and no other program sees that file under the name.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use common::{Mount, shell, succeed};

/// Opens every file named in the arguments, maps those whose name begins with `mapped`, and answers each line with the
/// bytes that it reads through the descriptor or the mapping: the first byte, the last one and one in the middle.
const READER: &str = r#"
import mmap, os, sys
held = []
for name in sys.argv[1:]:
    file = os.open(name, os.O_RDONLY)
    size = os.fstat(file).st_size
    mapping = mmap.mmap(file, size, prot=mmap.PROT_READ) if os.path.basename(name).startswith("mapped") else None
    held.append((file, mapping, size))
print("ready", flush=True)
for line in sys.stdin:
    found = b""
    for file, mapping, size in held:
        for at in (0, size // 2, size - 1):
            found += mapping[at:at + 1] if mapping else os.pread(file, 1, at)
    print(found.decode(), flush=True)
"#;

/// A process that holds files open.
struct Reader {
    process: Child,
    input: ChildStdin,
    output: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Reader {
    fn new(directory: &Path, names: &[String]) -> Self {
        let mut process = Command::new("python3")
            .args(["-c", READER])
            .args(names)
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        assert_eq!(output.next().unwrap().unwrap(), "ready");
        Self { process, input, output }
    }

    fn read(&mut self) -> String {
        self.input.write_all(b"read\n").unwrap();
        self.output.next().unwrap().unwrap()
    }

    fn end(mut self) {
        drop(self.input);
        self.process.wait().unwrap();
    }
}

const SIZES: [(&str, usize); 3] = [("small", 8 << 10), ("medium", 200 << 10), ("big", 1 << 20)];

/// From this size on files are read by the kernel and copied up in part.
const BIG: u64 = 512 << 10;

fn mounted(options: &[&str], fill: impl FnOnce(&Path)) -> Mount {
    let mount = Mount::unmounted(fill).with_big_files_from(BIG);
    mount.mount_with(options);
    mount
}
const CHANGES: [&str; 3] = ["truncate", "in-place", "rename"];

/// A file for each way of holding it, of changing it, and for each size.
fn names() -> Vec<String> {
    let mut names = Vec::new();
    for holding in ["open", "mapped"] {
        for change in CHANGES {
            names.extend(SIZES.iter().map(|(size, _)| format!("{holding}-{change}-{size}")));
        }
    }
    names
}

fn size_of(name: &str) -> usize {
    SIZES.iter().find(|(size, _)| name.ends_with(size)).unwrap().1
}

fn fill(root: &Path) {
    for name in names() {
        fs::write(root.join(&name), vec![b'o'; size_of(&name)]).unwrap();
    }
}

/// Gives a file new content of the same size in the way that its name says.
fn change(directory: &Path, name: &str, byte: u8) {
    let (path, content) = (directory.join(name), vec![byte; size_of(name)]);
    if name.contains("truncate") {
        fs::write(path, content).unwrap();
    } else if name.contains("in-place") {
        File::options().write(true).open(path).unwrap().write_all_at(&content, 0).unwrap();
    } else {
        fs::write(directory.join("temporary"), content).unwrap();
        fs::rename(directory.join("temporary"), path).unwrap();
    }
}

fn assert_all(directory: &Path, byte: u8, when: &str) {
    for name in names() {
        let path = directory.join(&name);
        assert_eq!(fs::metadata(&path).unwrap().size(), size_of(&name) as u64, "{when}: {name}");
        let is_whole = fs::read(&path).unwrap() == vec![byte; size_of(&name)];
        assert!(is_whole, "{when}: {name}: content that is not {}", byte as char);
    }
}

/// What a reader of all files finds that has only one kind of content.
fn all(byte: char) -> String {
    byte.to_string().repeat(3 * names().len())
}

/// `depth` branches of one another, with readers in each; the innermost changes every file, and all are committed.
fn commit_under_readers(options: &[&str], depth: usize) {
    let mount = mounted(options, fill);
    let mut parent = "main".to_owned();
    let mut readers = Vec::new();
    for level in 0..depth {
        let name = format!("level-{level}");
        let branch = mount.create_below(&parent, &name);
        // The kernel has pages of every second file before the commit.
        readers.push(Reader::new(&branch, &names()));
        if level % 2 == 0 {
            assert_eq!(readers[level].read(), all('o'));
        }
        parent = name;
    }
    let child = mount.create_below(&parent, "child");
    for name in names() {
        change(&child, &name, b'n');
    }
    mount.commit("child");
    for level in (0..depth).rev() {
        let (when, name) =
            (format!("{options:?}, level {level} of {depth}"), format!("level-{level}"));
        assert_eq!(readers[level].read(), all('o'), "{when}: readers keep what they opened");
        assert_all(&mount.branch(&name), b'n', &when);
        let mut late = Reader::new(&mount.branch(&name), &names());
        assert_eq!((late.read(), readers[level].read()), (all('n'), all('o')), "{when}");
        late.end();
        assert_all(&mount.branch(&name), b'n', &format!("{when}, after others have read"));
        readers.pop().unwrap().end();
        assert_all(&mount.branch(&name), b'n', &format!("{when}, without readers"));
        mount.commit(&name);
    }
    assert_all(&mount.base(), b'n', "the base");
}

#[test]
fn readers_of_a_parent_never_bring_back_what_a_childs_commit_replaced() {
    for options in [&[][..], &["--no-passthrough"]] {
        for depth in [1, 3] {
            commit_under_readers(options, depth);
        }
    }
}

#[test]
fn siblings_under_snapshot_keep_their_own_content_while_files_are_held() {
    let mount = mounted(&["--policy", "snapshot"], fill);
    let parent = mount.create("parent");
    let mut above = Reader::new(&parent, &names());
    let (first, second) =
        (mount.create_below("parent", "first"), mount.create_below("parent", "second"));
    let mut beside = Reader::new(&second, &names());
    assert_eq!(beside.read(), all('o'));
    for name in names() {
        change(&first, &name, b'n');
    }
    mount.commit("first");
    assert_eq!((above.read(), beside.read()), (all('o'), all('o')));
    assert_all(&second, b'o', "the sibling");
    assert_all(&parent, b'n', "the parent");
    // What main takes in and gives back is seen there alone.
    beside.end();
    above.end();
    mount.abort("second");
    let observer = mount.create("observer");
    let mut beside = Reader::new(&observer, &names());
    assert_eq!(beside.read(), all('o'));
    let mut main = Reader::new(&mount.mountpoint(), &names());
    mount.commit("parent");
    assert_all(&observer, b'o', "forked before the commit");
    assert_all(&mount.mountpoint(), b'n', "main");
    assert_eq!(beside.read(), all('o'));
    let mut after = Reader::new(&mount.mountpoint(), &names());
    for (verb, byte) in [("undo", b'o'), ("redo", b'n')] {
        assert_eq!((main.read(), after.read()), (all('o'), all('n')), "before {verb}");
        succeed(&mount.run(&[verb], &[]));
        assert_all(&mount.base(), byte, verb);
        assert_all(&mount.mountpoint(), byte, verb);
        assert_all(&observer, b'o', verb);
        assert_eq!((main.read(), after.read()), (all('o'), all('n')), "after {verb}");
        assert_all(&mount.mountpoint(), byte, verb);
    }
}

#[test]
fn a_file_of_the_base_that_others_replace_is_never_mixed_with_what_readers_hold() {
    for options in [&[][..], &["--no-passthrough"]] {
        let mount = mounted(options, fill);
        let branch = mount.create("branch");
        let mut early = Reader::new(&branch, &names());
        assert_eq!(early.read(), all('o'));
        let replaced: Vec<String> =
            names().into_iter().filter(|name| !name.contains("in-place")).collect();
        for name in &replaced {
            fs::write(mount.base().join("temporary"), vec![b'n'; size_of(name)]).unwrap();
            fs::rename(mount.base().join("temporary"), mount.base().join(name)).unwrap();
        }
        assert_eq!(early.read(), all('o'), "{options:?}: readers keep what they opened");
        for name in &replaced {
            let found = fs::read(branch.join(name)).unwrap();
            assert!(found == vec![b'n'; size_of(name)], "{options:?}: {name} read by path");
            shell(&branch, &format!("chmod 600 {name}; printf y >> {name}"));
            let found = fs::read(branch.join(name)).unwrap();
            let wanted = [vec![b'n'; size_of(name)], b"y".to_vec()].concat();
            assert!(found == wanted, "{options:?}: {name} changed in the branch");
        }
        assert_eq!(early.read(), all('o'), "{options:?}: after the copy-up");
        early.end();
    }
}

#[test]
fn a_writer_from_before_a_childs_commit_changes_its_own_branch_alone() {
    let mount = mounted(&["--no-passthrough"], |base| {
        shell(base, "echo base > kept; echo base > replaced");
    });
    let parent = mount.create("parent");
    shell(&parent, "echo parent > kept; echo parent > replaced");
    let open = |name: &str| File::options().read(true).write(true).open(parent.join(name)).unwrap();
    let (kept, replaced) = (open("kept"), open("replaced"));
    let child = mount.create_below("parent", "child");
    shell(&child, "echo child > replaced");
    mount.commit("child");
    kept.write_all_at(b"PARENT", 0).unwrap();
    replaced.write_all_at(b"PARENT", 0).unwrap();
    assert_eq!(fs::read_to_string(parent.join("kept")).unwrap(), "PARENT\n");
    assert_eq!(fs::read_to_string(parent.join("replaced")).unwrap(), "child\n");
    let mut found = [0; 6];
    replaced.read_exact_at(&mut found, 0).unwrap();
    assert_eq!(&found, b"PARENT", "who wrote it reads it");
    drop((kept, replaced));
    mount.commit("parent");
    assert_eq!(fs::read_to_string(mount.base().join("kept")).unwrap(), "PARENT\n");
    assert_eq!(fs::read_to_string(mount.base().join("replaced")).unwrap(), "child\n");
}
