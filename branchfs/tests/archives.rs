//! Branches as OCI layers: `branchfs export` and `branchfs import`.

#![allow(clippy::unwrap_used, missing_docs, reason = "test code")]

mod common;

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{Mount, PROGRAM, assert_same, refusal, shell, snapshot, succeed};

const FILLED: &str = "
    mkdir -p d/sub kept e r/a r/b; echo one > d/one; echo two > d/sub/two; echo file > file
    echo other > other; ln -s file link; ln file hard; echo in > kept/in; echo x > r/a/x; echo y > r/b/y
";

/// Everything that a layer can carry, and what hides the parent's.
const CHANGED: &str = "
    echo more >> d/one; rm -r kept; rm other; mkdir other; echo x > other/x; rm e -r; echo e > e
    rm -r r/a; mkdir r/a; echo new > r/a/new; mv r/b b; mv d moved; ln -sfn nowhere link
    mkfifo fifo; mknod null c 1 3; mknod zero c 0 0; deep=long/$(printf 'n%.0s' {1..120})/$(printf 'm%.0s' {1..200})
    mkdir -p $deep; echo deep > $deep/file; ln $deep/file first; ln first second; printf 'odd' > \"$(printf 'new\\nline\\377')\"
    echo odd > \"$(printf 'o\\377%.0s' {1..100})\"
    chown 1234567:3000000 file; chmod 4711 file; truncate -s 5M sparse; touch -d '1969-12-31 23:59:58.25' first
    touch -d '2001-02-03 04:05:06.123456789' moved r; chmod 1777 .
";

fn export(mount: &Mount, branch: &str) -> PathBuf {
    let archive = mount.directory.path().join(format!("{branch}.tar"));
    let output = mount.run(&["export", "-o", archive.to_str().unwrap(), branch], &[]);
    succeed(&output);
    archive
}

fn import_as(mount: &Mount, name: &str, archive: &Path, options: &[&str], user: u32) -> Output {
    let program = if user == 0 {
        PathBuf::from(PROGRAM)
    } else {
        common::program_for_others(mount.directory.path())
    };
    let mut command = Command::new(program);
    command.arg("import").args(options).arg(name).arg(mount.mountpoint());
    command.stdin(fs::File::open(archive).unwrap());
    if user != 0 {
        command.uid(user).gid(user);
    }
    command.output().unwrap()
}

fn import(mount: &Mount, name: &str, archive: &Path) -> Output {
    import_as(mount, name, archive, &[], 0)
}

#[test]
fn nothing_is_exported_as_an_archive_of_nothing_and_imported_as_an_untouched_branch() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let base = snapshot(&mount.base());
    mount.create("empty");
    export(&mount, "empty");
    shell(
        mount.directory.path(),
        "tar -tf empty.tar | cmp - /dev/null; tar -cf theirs.tar -T /dev/null",
    );
    for (name, archive) in [("ours", "empty.tar"), ("theirs", "theirs.tar")] {
        let output = import(&mount, name, &mount.directory.path().join(archive));
        succeed(&output);
        let is_noted =
            String::from_utf8_lossy(&output.stderr).contains("does not record the state");
        assert_eq!(
            is_noted,
            name == "theirs",
            "an exported archive has a record also if it is empty"
        );
        assert_same(&snapshot(&mount.branch(name)), &base, name);
        assert!(mount.run(&["diff", name], &[]).stdout.is_empty());
    }
    mount.commit("theirs");
    assert_same(&snapshot(&mount.base()), &base, "committed");
}

#[test]
fn an_archive_without_its_end_is_refused_wherever_it_was_cut() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let branch = mount.create("work");
    shell(&branch, "echo new > file; echo new > d/new; rm other; chmod 700 .");
    let archive = export(&mount, "work");
    let whole = fs::read(&archive).unwrap();
    let end = whole.len() - 1024;
    for length in (0..=end).step_by(256) {
        fs::OpenOptions::new().write(true).open(&archive).unwrap().set_len(0).unwrap();
        fs::write(&archive, &whole[..length]).unwrap();
        let said = refusal(&import(&mount, "cut", &archive));
        assert!(said.contains("archive"), "cut at {length}: {said}");
    }
    fs::write(&archive, &whole[..end + 512]).unwrap(); // as tar itself takes it
    succeed(&import(&mount, "half-marked", &archive));
    assert_same(&snapshot(&mount.branch("half-marked")), &snapshot(&branch), "imported");
}

fn set_xattrs(root: &Path) {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(root.join("first"), "user.note", b"a=b\n\0", flags).unwrap();
    rustix::fs::setxattr(root.join("moved"), "user.note", b"on a directory", flags).unwrap();
}

#[test]
fn an_imported_branch_commits_as_the_exported_one() {
    let source = Mount::over(|base| shell(base, FILLED));
    let original = source.base().display().to_string();
    let target = Mount::over(|base| {
        let copy = "rm -r .branching; touch -r";
        shell(base, &format!("cp -a '{original}/.' .; {copy} '{original}' ."));
    });
    let branch = source.create("branch");
    shell(&branch, CHANGED);
    set_xattrs(&branch);
    let archive = export(&source, "branch");
    succeed(&import(&target, "branch", &archive));
    let wanted = snapshot(&branch);
    source.commit("branch");
    assert_same(&snapshot(&target.branch("branch")), &wanted, "the imported branch");
    target.commit("branch");
    assert_same(&snapshot(&target.base()), &snapshot(&source.base()), "the base after its commit");
}

#[test]
fn a_nested_branch_of_several_layers_is_exported_whole() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let parent = mount.create("parent");
    shell(&parent, "mv d moved; echo x > new");
    let child = mount.create_below("parent", "child");
    shell(&child, "mv moved/sub sub; rm moved/one; echo y >> new");
    mount.commit("child");
    let archive = export(&mount, "parent");
    succeed(&import(&mount, "again", &archive));
    assert_same(&snapshot(&mount.branch("again")), &snapshot(&parent), "the imported branch");
}

#[test]
fn the_whole_view_of_a_branch_is_imported_into_an_empty_workspace() {
    let source = Mount::over(|base| shell(base, FILLED));
    let branch = source.create("branch");
    shell(&branch, CHANGED);
    set_xattrs(&branch);
    let archive = source.directory.path().join("whole.tar");
    let output = ["export", "--whole", "-o", archive.to_str().unwrap(), "branch"];
    succeed(&source.run(&output, &[]));
    let target = Mount::over(|_| {});
    succeed(&import(&target, "all", &archive));
    target.commit("all");
    source.commit("branch");
    assert_same(&snapshot(&target.base()), &snapshot(&source.base()), "the copy");
    assert!(refusal(&import(&target, "again", &archive)).contains("have changed since"));
}

#[test]
fn an_export_leaves_out_what_is_excluded_and_what_is_below_it() {
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("branch"), "echo secret > d/.env; mkdir -p new/sub; echo new > new/sub/x");
    let names = |options: &[&str]| {
        let words = [&["export", "branch"], options].concat();
        let output = mount.run(&words, &[]);
        succeed(&output);
        let archive = mount.directory.path().join("listed.tar");
        fs::write(&archive, output.stdout).unwrap();
        let listed = Command::new("tar").arg("tf").arg(&archive).output().unwrap().stdout;
        String::from_utf8(listed).unwrap()
    };
    let excluded = ["--exclude", ".env", "--exclude", "new"];
    assert_eq!(names(&excluded), "./\nd/\n"); // the times of both changed
    let whole = names(&[&["--whole"][..], &excluded].concat());
    assert!(whole.contains("d/sub/two") && !whole.contains(".env") && !whole.contains("new"));
}

#[test]
fn exports_are_the_same_bytes_every_time() {
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("branch"), CHANGED);
    let first = fs::read(export(&mount, "branch")).unwrap();
    shell(&mount.branch("branch"), "cat file d/* > /dev/null 2>&1 || :; ls -R > /dev/null");
    let output = mount.run(&["export", "branch"], &[]);
    succeed(&output);
    assert!(first == output.stdout, "the archives differ");
}

#[test]
fn an_export_to_a_device_leaves_the_device_in_place() {
    let mount = Mount::over(|base| shell(base, FILLED));
    shell(&mount.create("branch"), CHANGED);
    let device = mount.directory.path().join("null");
    shell(mount.directory.path(), "mknod -m 666 null c 1 3");
    succeed(&mount.run(&["export", "branch", "--output", device.to_str().unwrap()], &[]));
    shell(mount.directory.path(), "test -c null");
}

#[test]
fn tar_unpacks_what_is_new() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let branch = mount.create("branch");
    shell(&branch, CHANGED);
    set_xattrs(&branch);
    let archive = export(&mount, "branch");
    let out = mount.directory.path().join("out");
    fs::create_dir(&out).unwrap();
    let tar = Command::new("tar")
        .args(["--extract", "--xattrs", "--xattrs-include=user.*", "--same-owner", "-p", "-f"])
        .arg(&archive)
        .current_dir(&out)
        .output()
        .unwrap();
    succeed(&tar);
    let (found, wanted) = (snapshot(&out), snapshot(&branch));
    for (path, object) in &found {
        let is_whiteout = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b".wh."));
        if !is_whiteout {
            assert_eq!(Some(object), wanted.get(path), "{}", path.display());
        }
    }
    assert!(found.contains_key(Path::new(".wh.kept")) && found.contains_key(Path::new(".wh.d")));
    assert!(found.contains_key(Path::new("r/.wh.b")) && found.contains_key(Path::new("r/a/.wh.x")));
}

/// A layer as others write it: GNU tar's format, without the directories above, opaque marks in any order.
#[test]
fn layers_of_other_tools_are_understood() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let made = mount.directory.path().join("made");
    fs::create_dir(&made).unwrap();
    shell(
        &made,
        "deep=kept/$(printf 'n%.0s' {1..150}); mkdir -p d r/a $deep; echo new > d/new; : > d/.wh..wh..opq
         : > .wh.file; : > .wh.missing; : > r/.wh.a; echo z > r/a/z; echo long > $deep/file
         tar --format=gnu -cf ../other.tar d/new d/.wh..wh..opq r/a/z r/.wh.a .wh.file .wh.missing kept/n*/file",
    );
    let archive = mount.directory.path().join("other.tar");
    succeed(&import(&mount, "branch", &archive));
    let branch = mount.branch("branch");
    shell(
        &branch,
        "test \"$(ls d)\" = new; test ! -e file; test -e hard; test \"$(ls r/a)\" = z; test -e r/b/y
         test \"$(cat kept/n*/file)\" = long; test -e kept/in",
    );
    let wanted = snapshot(&branch);
    mount.commit("branch");
    assert_same(&snapshot(&mount.base()), &wanted, "the base after the commit");
}

/// An archive by hand: (type, path, link target, content).
fn archive(mount: &Mount, members: &[(u8, &str, &str, &[u8])]) -> PathBuf {
    let mut bytes = Vec::new();
    for (kind, path, target, content) in members {
        let mut block = [0_u8; 512];
        block[..path.len()].copy_from_slice(path.as_bytes());
        block[100..107].copy_from_slice(b"0000644");
        block[108..115].copy_from_slice(b"0000000");
        block[116..123].copy_from_slice(b"0000000");
        block[124..135].copy_from_slice(format!("{:011o}", content.len()).as_bytes());
        block[136..147].copy_from_slice(b"00000000000");
        block[156] = *kind;
        block[157..157 + target.len()].copy_from_slice(target.as_bytes());
        block[329..336].copy_from_slice(b"0000001");
        block[337..344].copy_from_slice(b"0000003");
        block[257..265].copy_from_slice(b"ustar\x0000");
        block[148..156].copy_from_slice(b"        ");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend_from_slice(&block);
        bytes.extend_from_slice(content);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.extend_from_slice(&[0; 1024]);
    let path = mount.directory.path().join("hostile.tar");
    fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
    path
}

#[test]
fn hostile_archives_are_refused_whole_and_leave_nothing() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let outside = mount.directory.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let escape = outside.to_str().unwrap();
    let good = (b'0', "good", "", &b"content"[..]);
    for (what, members) in [
        ("absolute", vec![good, (b'0', "/etc/branchfs-test", "", b"x")]),
        ("parent", vec![good, (b'0', "a/../../x", "", b"x")]),
        ("through a link", vec![good, (b'2', "out", escape, b""), (b'0', "out/x", "", b"x")]),
        ("whiteout through a link", vec![(b'2', "out", escape, b""), (b'0', "out/.wh.x", "", b"")]),
        (
            "mark through a link",
            vec![(b'2', "out", escape, b""), (b'0', "out/.wh..wh..opq", "", b"")],
        ),
        ("link to the base", vec![good, (b'1', "stolen", "file", b"")]),
        ("link out", vec![good, (b'1', "stolen", "../../x", b"")]),
        ("link to a directory", vec![(b'5', "new", "", b""), (b'1', "stolen", "new", b"")]),
        ("the store", vec![good, (b'0', ".branching/x", "", b"x")]),
        ("whiteout of a parent", vec![good, (b'0', ".wh...", "", b"")]),
        ("whiteout without a name", vec![good, (b'0', ".wh.", "", b"")]),
        ("below a file", vec![good, (b'0', "good/x", "", b"x")]),
        ("a file for a directory", vec![(b'5', "new", "", b""), (b'0', "new", "", b"x")]),
        ("root as a file", vec![(b'0', "./", "", b"x")]),
        ("a sparse file", vec![(b'S', "sparse", "", b"x")]),
        ("an unknown type", vec![good, (b'Z', "what", "", b"x")]),
        ("a global path", vec![(b'g', "g", "", b"13 path=/etc\n"), good]),
        ("a damaged record", vec![(b'x', "x", "", b"99 path=x\n"), good]),
        ("an absolute record", vec![(b'x', "x", "", b"13 path=/etc\n"), good]),
        (
            "a private attribute",
            vec![(b'x', "x", "", b"47 SCHILY.xattr.trusted.overlay.redirect=/../x\n"), good],
        ),
        ("a sparse record", vec![(b'x', "x", "", b"22 GNU.sparse.major=1\n"), good]),
        (
            "data beyond the end of a sparse file",
            vec![(b'x', "x", "", b"21 GNU.sparse.size=9\n22 GNU.sparse.map=4,7\n"), good],
        ),
        (
            "less data than the map of a sparse file names",
            vec![(b'x', "x", "", b"22 GNU.sparse.size=90\n22 GNU.sparse.map=4,9\n"), good],
        ),
    ] {
        let path = archive(&mount, &members);
        let told = refusal(&import(&mount, "branch", &path));
        assert!(told.contains("refused") || told.contains("cannot access"), "{what}: {told}");
        assert!(!mount.branch("branch").exists(), "{what}");
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    let cut = archive(&mount, &[(b'0', "cut", "", &[b'x'; 5000])]);
    fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(3000).unwrap();
    refusal(&import(&mount, "branch", &cut));
    let layers = mount.base().join(".branching/layers");
    assert_eq!(fs::read_dir(layers).unwrap().count(), 0, "a refused layer was left");
    succeed(&import(&mount, "branch", &archive(&mount, &[good])));
    assert_eq!(fs::read(mount.branch("branch").join("good")).unwrap(), b"content");
}

#[test]
fn a_user_brings_no_files_of_others_and_no_devices() {
    const USER: u32 = 54_321;
    let mount =
        Mount::unmounted(|base| shell(base, &format!("echo x > file; chown -R {USER}:{USER} .")));
    fs::set_permissions(mount.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    mount.mount();
    let roots = archive(&mount, &[(b'0', "root's", "", b"x")]);
    let told = refusal(&import_as(&mount, "branch", &roots, &[], USER));
    assert!(told.contains("--no-same-owner"), "{told}");
    let device = archive(&mount, &[(b'3', "null", "", b"")]);
    let told = refusal(&import_as(&mount, "branch", &device, &["--no-same-owner"], USER));
    assert!(told.contains("only root can import devices"), "{told}");
    let roots = archive(&mount, &[(b'0', "root's", "", b"x")]);
    succeed(&import_as(&mount, "branch", &roots, &["--no-same-owner"], USER));
    let object = &snapshot(&mount.branch("branch"))[Path::new("root's")];
    assert_eq!(object.owner, (USER, USER));
}

/// A file of root's in the user's own directory: the user may remove it, and even so not read it.
#[test]
fn content_is_handed_out_with_the_rights_of_who_asks() {
    const USER: u32 = 54_321;
    let mount = Mount::unmounted(|base| {
        shell(base, &format!("echo secret > secret; chmod 600 secret; chown {USER}:{USER} ."));
    });
    fs::set_permissions(mount.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    mount.mount();
    let branch = mount.create("branch");
    shell(&branch, "echo more >> secret");
    let program = common::program_for_others(mount.directory.path());
    for words in [&["diff", "--patch"][..], &["export"]] {
        let output = Command::new(&program)
            .args(words)
            .arg("branch")
            .arg(mount.mountpoint())
            .uid(USER)
            .gid(USER)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains("secret\n"), "{words:?}: {text}");
        let told = refusal(&output);
        assert!(told.contains("cannot access secret: Permission denied"), "{words:?}: {told}");
    }
    succeed(&mount.run(&["export", "branch"], &[]));
}

#[test]
fn objects_that_an_archive_cannot_hold_are_refused() {
    let mount = Mount::new();
    let branch = mount.create("branch");
    let socket = std::os::unix::net::UnixListener::bind(branch.join("socket")).unwrap();
    assert!(refusal(&mount.run(&["export", "branch"], &[])).contains("socket"));
    drop(socket);
    fs::remove_file(branch.join("socket")).unwrap();
    fs::write(branch.join(".wh.file"), "").unwrap();
    let into = mount.directory.path().join("never.tar");
    let output = mount.run(&["export", "-o", into.to_str().unwrap(), "branch"], &[]);
    assert!(refusal(&output).contains(".wh."));
    let left: Vec<_> = fs::read_dir(mount.directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(left.iter().all(|name| name == "base" || name == "mount"), "{left:?}");
}

/// Blocks of 512 bytes that the file takes on disk.
fn blocks(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks()
}

/// Holes are small in the archive and on disk, whatever wrote them.
#[test]
fn holes_stay_holes_in_an_archive_and_after_a_load() {
    const MIB: u64 = 1 << 20;
    let mount = Mount::over(|base| {
        shell(
            base,
            "truncate -s 64M big; printf base | dd of=big bs=1 seek=10M conv=notrunc status=none",
        );
    });
    let branch = mount.create("branch");
    let long = "n".repeat(120);
    shell(
        &branch,
        &format!(
            "truncate -s 64M middle; echo middle | dd of=middle bs=4k seek=10000 conv=notrunc status=none; truncate -s 3M empty
             truncate -s 2M end; echo end >>end; echo begin >begin; truncate -s 2M begin; mkdir {long}; cp --sparse=always middle {long}/{long}
             cp --sparse=always middle \"$(printf 'odd\\377')\"; ln middle linked; head -c 100000 /dev/urandom >dense
             for n in $(seq 0 100 3000); do printf x | dd of=holes bs=1k seek=$n conv=notrunc status=none; done; printf branch | dd of=big bs=1 seek=50M conv=notrunc status=none"
        ),
    );
    let read = |path: &Path| {
        String::from_utf8(Command::new("sha1sum").arg(path).output().unwrap().stdout).unwrap()[..40]
            .to_owned()
    };
    let names = ["big", "middle", "empty", "end", "begin", "holes", "dense"];
    let wanted: Vec<String> = names.iter().map(|name| read(&branch.join(name))).collect();
    let archive = export(&mount, "branch");
    let bytes = fs::metadata(&archive).unwrap().len();
    assert!(bytes < MIB, "{bytes} bytes");
    let unpacked = mount.directory.path().join("unpacked");
    fs::create_dir(&unpacked).unwrap();
    shell(&unpacked, "tar --xattrs -xf ../branch.tar; test $(stat -c %h middle) = 2");
    shell(&unpacked, "tar -cf ../plain.tar --format=gnu holes end dense");
    let packed = [
        ("ours", "true"),
        ("gnu", "tar -cSf ../packed.tar --format=gnu ."),
        ("v00", "tar -cSf ../packed.tar --format=posix --sparse-version=0.0 ."),
        ("v01", "tar -cSf ../packed.tar --format=posix --sparse-version=0.1 ."),
        ("v10", "tar -cSf ../packed.tar --format=posix --sparse-version=1.0 ."),
    ];
    for (name, pack) in packed {
        shell(&unpacked, pack);
        let archive =
            if name == "ours" { archive.clone() } else { archive.with_file_name("packed.tar") };
        succeed(&import(&mount, name, &archive));
        for (file, wanted) in names.iter().zip(&wanted) {
            assert_eq!(&read(&mount.branch(name).join(file)), wanted, "{file} of {name}");
            let upper = mount.branch(name).join(file);
            assert!(*file == "dense" || blocks(&upper) < MIB / 512, "{file} of {name}");
        }
        assert_eq!(read(&mount.branch(name).join(&long).join(&long)), wanted[1]);
        mount.abort(name);
    }
    succeed(&import(&mount, "plain", &archive.with_file_name("plain.tar")));
    assert_eq!(read(&mount.branch("plain").join("holes")), wanted[5]);
}

#[test]
fn an_archive_is_not_loaded_over_what_has_changed_since_it_was_made() {
    let mount = Mount::over(|base| shell(base, FILLED));
    let branch = mount.create("branch");
    shell(&branch, "echo branch >file; rm -r kept; echo new >new; rm link; chmod 700 e");
    let archive = export(&mount, "branch");
    let wanted = snapshot(&branch);
    mount.abort("branch");
    shell(
        &mount.base(),
        "cp --preserve=mode file x; mv x file; touch -d 2001-01-01 kept/in; echo x >d/other",
    );
    succeed(&import(&mount, "same-content", &archive));
    mount.abort("same-content");
    let changes = [
        ("echo theirs >>file", "file"),
        ("echo theirs >kept/in", "kept/in"),
        ("echo theirs >new", "new"),
        ("ln -sfn theirs link", "link"),
        ("chmod 750 e", "e"),
        ("rm file", "file"),
    ];
    for (change, path) in changes {
        // Not the store: the daemon goes on working in it.
        let save = "mkdir ../saved; find . -mindepth 1 -maxdepth 1 ! -name .branching -exec cp -a -t ../saved {} +";
        shell(&mount.base(), &format!("{save}; touch -r . ../saved; {change}"));
        let said = refusal(&import(&mount, "changed", &archive));
        assert!(
            said.contains(&format!("\n  {path}\n")) && said.contains("--force"),
            "{change}: {said}"
        );
        assert!(!mount.branch("changed").exists());
        succeed(&import_as(&mount, "forced", &archive, &["--force"], 0));
        assert_eq!(fs::read_to_string(mount.branch("forced").join("file")).unwrap(), "branch\n");
        mount.abort("forced");
        shell(
            &mount.base(),
            "find . -mindepth 1 -maxdepth 1 ! -name .branching -exec rm -r {} +; cp -a ../saved/. .; rm -r ../saved",
        );
    }
    let elsewhere = Mount::over(|base| shell(base, FILLED));
    succeed(&import(&elsewhere, "branch", &archive));
    assert_eq!(snapshot(&elsewhere.branch("branch")).len(), wanted.len());
    shell(mount.directory.path(), "mkdir u; tar -cf foreign.tar u");
    let output = import(&mount, "foreign", &mount.directory.path().join("foreign.tar"));
    succeed(&output);
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("does not record the state it was made from")
    );
}

/// The default ACL of a directory is for what is created in it; the objects of an archive have the ACLs that the archive has.
#[test]
fn an_imported_object_gets_no_acl_that_its_archive_does_not_have() {
    const ACLS: &str = "cd '{}'; find . -path ./.branching -prune -o -print0 | sort -z | xargs -0 getfacl -n --skip-base";
    const OTHER: u32 = 1000;
    let acls = |root: &Path| {
        let list = ACLS.replace("{}", root.to_str().unwrap());
        let output = Command::new("sh").args(["-c", &list]).output().unwrap();
        succeed(&output);
        String::from_utf8(output.stdout).unwrap()
    };
    let may_read = |path: PathBuf| {
        Command::new("cat").arg(path).uid(OTHER).gid(OTHER).output().unwrap().status.success()
    };
    let mount = Mount::over(|base| {
        shell(
            base,
            "mkdir d; setfacl -d -m u:1000:rwx d; echo old >d/changed; setfacl -b d/changed; chmod 640 d/changed",
        );
        fs::set_permissions(base, fs::Permissions::from_mode(0o755)).unwrap();
    });
    fs::set_permissions(mount.directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let branch = mount.create("made");
    shell(
        &branch,
        "cd d; echo more >>changed; echo secret >new; mkdir -p sub/deep; echo secret >sub/deep/file; ln new twin; mkfifo fifo
         setfacl -b new sub sub/deep sub/deep/file fifo; setfacl -k sub; setfacl -k sub/deep
         chmod 640 new sub/deep/file fifo; echo given >given; setfacl -b given; setfacl -m u:1000:r given; mkdir own; setfacl -b own; setfacl -k own; setfacl -d -m u:1001:r own",
    );
    let wanted = acls(&branch);
    let archive = export(&mount, "made");
    succeed(&import(&mount, "loaded", &archive));
    let loaded = mount.branch("loaded");
    assert_eq!(acls(&loaded), wanted, "in the branch");
    mount.commit("loaded");
    assert_eq!(acls(&mount.base()), wanted, "in the base");
    for secret in ["d/new", "d/twin", "d/changed", "d/sub/deep/file"] {
        assert!(!may_read(mount.base().join(secret)), "{secret}");
    }
    assert!(may_read(mount.base().join("d/given")));
}
