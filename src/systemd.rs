//! What systemd hands over at the start, and what it hears of the process. Without it nothing happens here.

use std::{env, io, net::TcpListener};

use listenfd::ListenFd;
use sd_notify::NotifyState;

/// How the operators' socket is named (`FileDescriptorName=`) where the order isn't to tell.
const ADMIN: &str = "admin";

/// Sockets that listen already. They outlive the process, so clients find somebody's door while it restarts.
#[derive(Debug, Default)]
pub struct Sockets {
    /// For clients: the first.
    pub clients: Option<TcpListener>,
    /// For operators: the one named `admin`, or else the second.
    pub operators: Option<TcpListener>,
}

/// How far the process is.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// Requests are served, by the configuration as it is.
    Ready,
    /// The configuration is read again.
    Reloading,
    /// No more requests are taken.
    Stopping,
}

impl Sockets {
    /// Takes what `LISTEN_FDS` tells of. To be called first of all, while the process has one thread.
    ///
    /// # Errors
    /// When something else than two listeners for TCP was handed over.
    pub fn take() -> io::Result<Self> {
        let names = env::var("LISTEN_FDNAMES").unwrap_or_default();
        let names: Vec<&str> = names.split(':').collect();
        let (mut handed, mut sockets) = (ListenFd::from_env(), Self::default());
        for place in 0..handed.len() {
            let Some(socket) = handed.take_tcp_listener(place)? else { continue };
            socket.set_nonblocking(true)?;
            let is_admin = names.get(place) == Some(&ADMIN) || sockets.clients.is_some();
            let owner = if is_admin { &mut sockets.operators } else { &mut sockets.clients };
            if owner.replace(socket).is_some() {
                return Err(io::Error::other(
                    "more sockets than one for clients and one for operators",
                ));
            }
        }
        Ok(sockets)
    }
}

/// Tells systemd, where it asked for that.
pub fn tell(progress: Progress) {
    let told = match progress {
        Progress::Ready => sd_notify::notify(&[NotifyState::Ready]),
        Progress::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
        Progress::Reloading => NotifyState::monotonic_usec_now()
            .and_then(|now| sd_notify::notify(&[NotifyState::Reloading, now])),
    };
    if let Err(error) = told {
        tracing::warn!(%error, ?progress, "systemd could not be told");
    }
}
